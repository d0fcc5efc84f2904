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

# Whose code is told what is there: Python's, torch's, ours, and that of arrays and formulas, to
# which no tensor comes (a recording refuses `numpy()`).
_KEPT = frozenset(
    sys.stdlib_module_names - {"__main__"}
    | {"torch", "merakc", "numpy", "scipy", "sympy", "mpmath", "networkx"}
)
# The modules that were there at the last recording, and the namespaces of those that are told: to
# look through thousands takes milliseconds.
_loaded: list[Any] = []
_told: list[dict[str, Any]] = []
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
    loaded = [*sys.modules.values()]
    if [*map(id, loaded)] != [*map(id, _loaded)]:
        _loaded[:], _told[:] = loaded, [*filter(None, map(_space, loaded))]
    own = {id(x): x for x in map(_globals_of, {type(m) for m in model.modules()})}
    told = [x for x in (*_told, *own.values()) if "type" not in x]
    for space in told:
        space["type"] = Type
    try:
        yield
    finally:
        for space in told:
            space.pop("type", None)


def _space(module: Any) -> dict[str, Any] | None:
    """The namespace of a module whose code is told the usual types."""
    kept = _is_kept(getattr(module, "__name__", None))
    return None if kept else getattr(module, "__dict__", None)


def _globals_of(kind: type[nn.Module]) -> dict[str, Any]:
    """The namespace of a class's forward, which may be that of no module."""
    found: dict[str, Any] = getattr(kind.forward, "__globals__", {})
    return {} if _is_kept(found.get("__name__", "")) else found


def _is_kept(name: Any) -> bool:
    return not isinstance(name, str) or name.partition(".")[0] in _KEPT
