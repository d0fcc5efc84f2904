"""Parameters that others have taken the place of: whatever would use them is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Never

import torch
from torch import nn

from merakc.errors import ConfigError

# What Python asks of a tensor to find it in a container.
_IDENTITY = {torch.Tensor.__hash__: id}


class Retired(nn.Parameter):
    """A parameter that no step reads any more, which `told` says of it."""

    told: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuses all but to be looked for."""
        if func in _IDENTITY:
            return _IDENTITY[func](args[0])
        own = next((a for a in (*args, *(kwargs or {}).values()) if isinstance(a, cls)), None)
        _refuse("a parameter is one that is no longer used" if own is None else own.told)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Retired({self.told!r})"


def check_idle(name: str, parameter: torch.Tensor, what: str, own_hooks: int = 0) -> None:
    """Raises `ConfigError` for a parameter that cannot be replaced: one with a gradient, and one on
    which users have hooks, beside `own_hooks` of ours of each kind.
    """
    with torch._C.DisableTorchFunctionSubclass():
        gradient = parameter.grad
        hooks: Any = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    if gradient is not None:
        raise ConfigError(
            f"'{name}' has a gradient, of which {what} cannot say which layer's it is: call it "
            "between steps, behind optimizer.step() and optimizer.zero_grad()"
        )
    if any(len(own or ()) > own_hooks for own in hooks):
        raise ConfigError(
            f"a hook is registered on '{name}', which {what} replaces: remove it, and register it "
            "on the parameters that there are then"
        )


def retire(parameter: nn.Parameter, told: str) -> None:
    """Refuses whatever uses a parameter from here on, such as an optimizer that still holds it, or
    the backward of a loss that was computed before.
    """
    refuse: Callable[..., Never] = partial(_refuse, told)
    if parameter.requires_grad:
        parameter.register_hook(refuse)  # type: ignore[no-untyped-call]
    parameter.__class__ = Retired
    parameter.told = told  # type: ignore[attr-defined]


def _refuse(told: str, *_: Any) -> Never:
    raise ConfigError(told)
