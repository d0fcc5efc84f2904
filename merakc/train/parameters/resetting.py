"""A module's own `reset_parameters`, on a parallel model: the whole module's, of which each rank
takes its parts.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from merakc.errors import ConfigError
from merakc.runtime.groups import from_rank_0
from merakc.runtime.health.job import call
from merakc.runtime.part import local_of, plain
from merakc.train.parameters.initial import replace_tensors
from merakc.train.parameters.places import elsewhere

RESETS = ("reset_parameters", "_reset_parameters", "reset_running_stats")


@torch.no_grad()
def reset(part: nn.Module, source: nn.Module, method: str) -> None:
    """Calls a method of the user's module on a copy of it that has memory, and takes over what it
    has written, with rank 0's random state. Every rank must call it.

    Raises `ConfigError` where the method makes what is not finite, as of values that it only reads.
    """
    whole = copy.deepcopy(source)  # on the meta device
    replace_tensors(whole, lambda _, t: _unset(t))
    with call(f"{type(source).__name__}.{method}"):
        state = from_rank_0(torch.get_rng_state)
    own = nullcontext() if torch.equal(state, torch.get_rng_state()) else torch.random.fork_rng([])
    with own, _Writes() as writes:
        torch.set_rng_state(state)
        getattr(whole, method)()
    held = _named(part)
    for name, tensor in _named(whole).items():
        if tensor.untyped_storage()._cdata not in writes.storages:
            continue
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ConfigError(
                f"{type(source).__name__}.{method} of a parallel model makes '{name}' of values "
                "that it does not set, of which this rank may hold a part: call it before "
                "auto_parallel"
            )
        target = held.get(name)  # other pipeline ranks have the buffers of others
        if target is not None and target not in elsewhere:
            plain(target).copy_(local_of(target, tensor.detach()))


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Which memory is written."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs an operation."""
        kwargs = kwargs or {}
        told = func._schema.arguments
        given = [*zip(told, args, strict=False), *((a, kwargs.get(a.name)) for a in told)]
        for argument, value in given:
            if argument.alias_info is not None and argument.alias_info.is_write:
                leaves = (x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor))
                self.storages |= {x.untyped_storage()._cdata for x in leaves}
        return func(*args, **kwargs)


def _named(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _unset(like: torch.Tensor) -> torch.Tensor:
    """Memory in which what is read before it is written shows."""
    return torch.full_like(like, torch.nan if like.is_floating_point() else 0, device="cpu")
