"""What a forward is told of the types of what is recorded: those of what it stands for.

`type(x) is torch.Tensor` holds of a tensor in one process, and would not of one that is recorded.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

# Whose code is told what is there.
_KEPT = frozenset(sys.stdlib_module_names - {"__main__"} | {"torch", "merakc"})
_NUMBERS = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


class _TypeOfType(type):
    """Makes `Type` behave like `type` wherever else it is used."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            return kind_of(args[0])
        return type(*args, **kwargs)

    def __instancecheck__(cls, thing: Any) -> bool:
        return isinstance(thing, type)

    def __subclasscheck__(cls, kind: Any) -> bool:
        return issubclass(kind, type)

    def __getitem__(cls, item: Any) -> Any:
        return type[item]


class Type(type, metaclass=_TypeOfType):
    """Stands for `type` in the code that a recording runs."""


def kind_of(thing: Any) -> Any:
    """The type of a thing, as it is where nothing is recorded."""
    kind = type(thing)
    if kind is FakeTensor:
        return nn.Parameter if getattr(thing, "_is_param", False) else torch.Tensor
    return Type if kind is type else _NUMBERS.get(kind, kind)


@contextlib.contextmanager
def usual_types(model: nn.Module) -> Iterator[None]:
    """Has `type(x)` say so in all code but torch's, Python's own and ours."""
    classes = {type(module) for module in model.modules()}
    spaces = [vars(module) for module in [*sys.modules.values()] if hasattr(module, "__dict__")]
    spaces += [getattr(kind.forward, "__globals__", {}) for kind in classes]
    told = {id(x): x for x in spaces if "type" not in x and not _is_kept(x.get("__name__"))}
    for space in told.values():
        space["type"] = Type
    try:
        yield
    finally:
        for space in told.values():
            space.pop("type", None)


def _is_kept(module: Any) -> bool:
    return not isinstance(module, str) or module.partition(".")[0] in _KEPT
