"""Methods of the user's own model, on a model of which this rank holds a part.

They are called on the parallel model. What they ask of a parameter's size is answered for the whole
parameter, and what would compute with a part of it, or with one that is on other ranks, is refused.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from inspect import isgeneratorfunction
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import ParametrizationList
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode_temporarily,
)

from merakc.errors import ConfigError
from merakc.runtime.part import place_of
from merakc.train.parameters.elements import Known
from merakc.train.parameters.optimizers import holdings
from merakc.train.parameters.places import elsewhere

REMEDY = (
    "merakc.export(folder, model) writes the whole weights as from_pretrained reads them, "
    "merakc.save a checkpoint, model.full_state_dict() gathers on rank 0, and "
    "model.predict(...) computes"
)
# What is asked about a tensor and not of its elements: of the whole, and of this rank's.
_OF_WHOLE = {"shape", "size", "numel", "nelement", "dim", "ndim", "ndimension", "nbytes", "__len__"}
_OF_ANY = {
    "device", "dtype", "layout", "grad", "requires_grad", "requires_grad_", "is_leaf", "is_meta",
    "is_cuda", "is_cpu", "is_sparse", "is_quantized", "is_floating_point", "is_complex",
    "element_size", "itemsize", "grad_fn", "__hash__", "is_shared", "register_hook",
    "register_post_accumulate_grad_hook",
}  # fmt: skip
_ACCESS = ("__get__", "__set__", "__delete__")


# Containers of torch's that may be sliced, by how they are indexed.
SLICED: dict[Any, type[nn.Module]] = {
    kind.__getitem__: kind for kind in (nn.Sequential, nn.ModuleList, nn.ParameterList)
}


class _Here(threading.local):
    guard: Guard | None = None


_here = _Here()


class Guard(TorchFunctionMode):
    """While the method `called` runs."""

    def __init__(self, called: str) -> None:
        super().__init__()
        self.called = called

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """See the module's text."""
        kwargs, name = kwargs or {}, _name(func)
        for leaf in pytree.tree_leaves((args, kwargs)):
            shape = _whole_shape(leaf) if isinstance(leaf, torch.Tensor) else None
            shape = None if isinstance(leaf, Known) else shape
            if shape is None:
                continue
            if name in _OF_WHOLE and func.__name__ != "__set__" and leaf is args[0]:
                whole = torch.empty(shape, dtype=leaf.dtype, device="meta")
                return func(whole, *args[1:], **kwargs)
            if name not in _OF_ANY:
                raise ConfigError(
                    f"{self.called} uses 'torch.Tensor.{name}' of a parameter of "
                    f"{tuple(shape)}, of which this rank holds {leaf.numel()} elements, and would "
                    f"take them for all: {REMEDY}"
                )
        return func(*args, **kwargs)

    def asks(self, func: Any) -> bool:
        """Whether a call asks something about a tensor, and changes none of its elements."""
        return _name(func) in _OF_WHOLE | _OF_ANY and func.__name__ not in ("__set__", "__delete__")


def _name(func: Any) -> str:
    """What is called, or asked for."""
    return str(func.__self__.__name__ if func.__name__ in _ACCESS else func.__name__)


def _whole_shape(tensor: torch.Tensor) -> Sequence[int] | None:
    """The shape of the whole, of a tensor that this rank has a part of, or nothing."""
    place = place_of(tensor)
    shape: Sequence[int] | None = elsewhere.get(tensor)  # type: ignore[no-untyped-call]
    return place.shape if place is not None and not place.is_whole else shape


def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A user's method as it is called on a parallel model."""

    @wraps(function)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _here.guard is not None or not self._in_parts:
            return function(self, *args, **kwargs)
        with guard(Guard(f"{type(self).__name__}.{function.__name__}")):
            found = function(self, *args, **kwargs)
            return iter([*found]) if isgeneratorfunction(function) else found

    return run


@contextmanager
def guard(by: Guard) -> Iterator[None]:
    """Guards the parameters of parallel models while a method runs."""
    _here.guard = by
    try:
        with by:
            yield
    finally:
        _here.guard = None


def guarding() -> Guard | None:
    """What guards them now."""
    return _here.guard


def indexed(kind: type[nn.Module]) -> Any:
    """How a container of torch's is indexed; a slice of it is another, of its parts."""

    def get(part: Any, at: Any) -> Any:
        if not isinstance(at, slice):
            return kind.__getitem__(part, at)  # type: ignore[index]
        if kind is nn.ParameterList:
            return nn.ParameterList([part[k] for k in range(len(part))[at]])
        chosen = OrderedDict([*part._modules.items()][at])
        return nn.Sequential(chosen) if kind is nn.Sequential else nn.ModuleList(chosen.values())

    return get


def unguarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A method of ours, which knows of parts, for methods of the user's to call."""

    @wraps(function)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        held = _here.guard
        stack = _get_current_function_mode_stack() if held is not None else []  # type: ignore[no-untyped-call]
        if not stack or stack[-1] is not held:
            return function(self, *args, **kwargs)
        _here.guard = None
        try:
            with _pop_mode_temporarily():
                return function(self, *args, **kwargs)
        finally:
            _here.guard = held

    return run


@cache
def guard_torch() -> None:
    """Has what torch puts around models, and into them, refuse those of `auto_parallel`."""
    _guard_ddp()
    _guard_parametrizations()


def _guard_ddp() -> None:
    """Has DistributedDataParallel refuse parameters of parallel models, whatever holds them: it
    would put rank 0's parts in the place of other ranks'.
    """
    plain = DistributedDataParallel.__init__

    @wraps(plain)
    def init(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if any(parameter in holdings for parameter in module.parameters()):
            raise ConfigError(
                "DistributedDataParallel is put around a model that auto_parallel runs, or what "
                "holds one, which reduces its gradients over dp itself: it would add up parts of "
                "other parameters; leave it out; of transformers' Trainer, accelerate and "
                "Lightning use those of merakc.integrations"
            )
        plain(self, module, *args, **kwargs)

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]


def _guard_parametrizations() -> None:
    """Has torch's parametrizations refuse tensors of parallel models, before they change anything:
    a rank may hold a part of them, and steps are compiled without.
    """
    plain = ParametrizationList.__init__

    @wraps(plain)
    def init(self: Any, modules: Any, original: Any, unsafe: bool = False) -> None:
        if original in holdings or original in elsewhere or isinstance(original, Known):
            names = ", ".join(type(module).__name__ for module in modules)
            raise ConfigError(
                f"a parametrization ({names}) is registered on a tensor of a model that "
                "auto_parallel runs, whose steps are compiled without it: call torch.nn.utils."
                "parametrize and parametrizations (weight_norm, spectral_norm) on the model before "
                "auto_parallel"
            )
        plain(self, modules, original, unsafe)

    ParametrizationList.__init__ = init  # type: ignore[method-assign]


def refuse_in_methods(name: str) -> None:
    """Raises `ConfigError` where a user's method asks for what this rank has only a part of."""
    if _here.guard is not None:
        raise ConfigError(
            f"{_here.guard.called} reads {name}, of which this rank holds a part: {REMEDY}"
        )
