"""What ranks must have in common at a call of the model: its mode, and the shapes of its batch."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any

import torch
import torch.utils._pytree as pytree

from merakc.batches.split import named_tensors, path_name
from merakc.errors import ConfigError
from merakc.frontend.python.plain_tensors import check_batch
from merakc.lowering.forwards import autocast_of
from merakc.runtime.health.facts import ALL
from merakc.runtime.health.job import call
from merakc.train.data.metrics import count_once
from merakc.train.steps import Steps

# The tensors of a batch that are told by name where ranks differ.
_TOLD = 8
# What is told of a batch without any.
_NO_TENSORS = (
    " and no tensors (ranks that are given None have the others' batch where some are from the "
    "model's first call on)"
)


@contextmanager
def model_call(
    steps: Steps,
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    training: bool,
    runs: bool = True,
) -> Iterator[None]:
    """A call of the model with a batch, of all ranks: `merakc.runtime.health.job.call`. Where the
    batch `runs`, each of its tensors has to have values.

    Under `torch.inference_mode` it is one without gradients, and its tensors are plain ones: what
    is recorded and kept serves later calls, too.
    """
    with ExitStack() as around:
        facts = None
        if steps.groups.mesh.world_size > 1:
            changed = around.enter_context(steps.settings.looked_at())
            facts = _facts(steps, name, args, kwargs, changed, training=training)
        count_once()
        if torch.is_inference_mode_enabled():
            around.enter_context(torch.inference_mode(mode=False))
            around.enter_context(torch.no_grad())
        around.enter_context(call(name, facts, prompt=False))
        check_batch(named_tensors(args, kwargs), with_values=runs)
        yield


def check_trained(line: str, parameters: Mapping[str, torch.Tensor]) -> None:
    """Raises `ConfigError` where a parameter is frozen that was not when the step was recorded, and
    the forward asks, at this line, whether something requires a gradient.
    """
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            raise ConfigError(
                f"parameter '{name}' requires no gradient now, and did when the model was compiled,"
                f" whose forward asks at {line} whether something requires one: it may do something"
                " else then. Let it go by an attribute of the model, or freeze before auto_parallel"
            )


def check_frozen(parameters: Mapping[str, torch.Tensor]) -> None:
    """Raises `ConfigError`, on all ranks, where one of these, all that were frozen when the model
    was compiled, is trainable now: before a step is taken that would leave it as it is.
    """
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            raise ConfigError(
                f"parameter '{name}' requires a gradient now and did not when the model was "
                "compiled; leave it trainable before auto_parallel, and freeze it behind that "
                "(requires_grad_(False)): it may then change between steps"
            )


def _facts(
    steps: Steps,
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    changed: Sequence[tuple[str, str]],
    *,
    training: bool,
) -> dict[str, str]:
    """What the ranks of a call have in common: those of a dp replica the whole batch and what is
    `changed` in Python, those of others the mode alone.
    """
    mesh = steps.groups.mesh
    mode = f"{name} in {'training' if training else 'eval'} mode"
    mode += "" if torch.is_grad_enabled() else " without gradients"
    modes = steps.settings.modes()
    if len(set(modes)) > 1:
        mode += f", but for modules (mark {zlib.crc32(bytes(modes)):x})"
    dtype, autocast = autocast_of(steps.device)
    mode += f" under autocast to {dtype}" if autocast else ""
    if mesh.dp == mesh.world_size:
        return {ALL: mode}
    told = f"{mode}, with {_words(args, kwargs)}"
    if changed:
        names = ", ".join(name for name, _ in changed[:_TOLD])
        told += f", and with {names} changed (mark {zlib.crc32(repr(changed).encode()):x})"
    return {ALL: told} if mesh.dp == 1 else {ALL: mode, _replica(steps): told}


def _replica(steps: Steps) -> str:
    """The scope of the ranks that are given the same batch as this one."""
    mesh, own = steps.groups.mesh, steps.groups.coordinates[0]
    return _ranks(tuple(r for r in range(mesh.world_size) if mesh.coordinates(r)[0] == own))


@lru_cache
def _ranks(ranks: tuple[int, ...]) -> str:
    return ",".join(map(str, ranks))


def _words(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """A batch by its shapes and plain values."""
    named = pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))[0]
    told = [f"{path_name(path)} {_word(leaf)}" for path, leaf in named]
    if not any(isinstance(leaf, torch.Tensor) for _, leaf in named):
        return f"{', '.join(told) or 'no batch'}{_NO_TENSORS}"
    if len(told) <= _TOLD:
        return ", ".join(told)
    mark = zlib.crc32(", ".join(told).encode())
    return f"{', '.join(told[:_TOLD])} and {len(told) - _TOLD} more (mark {mark:x})"


def _word(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        shape = "[nested]" if leaf.is_nested else list(leaf.shape)
        return f"{str(leaf.dtype).removeprefix('torch.')}{shape}"
    return repr(leaf) if isinstance(leaf, (bool, int, float, str)) else type(leaf).__name__
