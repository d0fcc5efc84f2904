"""Parameters and gradients that are no longer what they were: whoever uses them is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Never

import torch
from torch import nn

from merakc.errors import ConfigError

# What Python asks of a tensor to find it in a container.
_IDENTITY = {torch.Tensor.__hash__: id}


_TOLD = (
    "between the model's call and optimizer.step(), and merakc.step_in_backward has used the "
    "gradient and updated the parameter already: do it behind optimizer.step(), or leave "
    "step_in_backward out, as where gradients are clipped or norms are read (as transformers' "
    "Trainer does)"
)
_PROPERTIES = (
    "requires_grad", "is_leaf", "shape", "dtype", "device", "ndim", "layout", "_version",
    "_backward_hooks", "_post_accumulate_grad_hooks",
)  # fmt: skip
# What may be asked of a parameter or a gradient then, of a parameter alone, and of a gradient.
_ASKED = {getattr(torch.Tensor, name).__get__ for name in _PROPERTIES}
_ASKED |= {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.__len__}
_GRADIENT: Any = torch.Tensor.grad
_OF_PARAMETERS = {_GRADIENT.__get__, _GRADIENT.__set__, _GRADIENT.__delete__}
_HISTORY: Any = torch.Tensor.grad_fn
_OF_GRADIENTS = {_HISTORY.__get__, torch.Tensor.requires_grad_}
_CLEARS = {torch.Tensor.zero_, torch._foreach_zero_}


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


class Updated(nn.Parameter):
    """A parameter between its update in the backward and the optimizer's step."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuses all but to be asked what it is, and for its gradient."""
        if func in _IDENTITY:
            return _IDENTITY[func](args[0])
        if func not in _ASKED and func not in _OF_PARAMETERS:
            _refuse(f"a parameter is read or written {_TOLD}")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Spent(torch.Tensor):
    """Stands for a gradient that an update has used, until it is `cleared`."""

    cleared = False

    @staticmethod
    def __new__(cls: type[Spent], gradient: torch.Tensor) -> Spent:
        """Of its shape, without memory."""
        made: Spent = torch.Tensor._make_wrapper_subclass(
            cls, gradient.shape, dtype=gradient.dtype, device=gradient.device
        )
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuses all but to be told apart, and set to zero."""
        if func in _IDENTITY:
            return _IDENTITY[func](args[0])
        if func in _CLEARS:
            for own in args[0] if isinstance(args[0], (list, tuple)) else args[:1]:
                if isinstance(own, cls):
                    own.cleared = True
                else:
                    own.zero_()
            return args[0]
        if func not in _ASKED and func not in _OF_GRADIENTS:
            _refuse(f"a gradient is read or written {_TOLD}")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Never:
        """Refuses what torch calls below."""
        _refuse(f"a gradient is read or written {_TOLD}")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return "Spent()"


class Locked(dict[Any, Any]):
    """Stands for an optimizer's state, while updates in the backward are not to be seen."""

    def _refused(self, *_: Any, **__: Any) -> Never:
        _refuse(f"the optimizer's state is read or written {_TOLD}")

    __getitem__ = __setitem__ = __delitem__ = __iter__ = __len__ = __contains__ = _refused
    __repr__ = __reduce_ex__ = __copy__ = __deepcopy__ = __eq__ = _refused
    get = items = keys = values = pop = popitem = clear = update = setdefault = copy = _refused


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
