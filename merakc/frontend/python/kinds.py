"""What a forward is told of the types of what is recorded: those of what it stands for.

`type(x) is torch.Tensor` holds of a tensor in one process, and would not of one that is recorded.
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import FrameType, MappingProxyType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from merakc.errors import RecordError
from merakc.frontend.source import called_by_a_library, user_line

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
_PASSING = (torch.Tensor.__dir__.__code__, abc.ABCMeta.__instancecheck__.__code__)
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
        return _class_of(thing)
    return Type if kind is type else _NUMBERS.get(kind, kind)


@contextlib.contextmanager
def usual_types(model: nn.Module) -> Iterator[None]:
    """Has `type(x)`, `x.__class__`, `vars(x)` and `dir(x)` say so in all code but torch's, Python's
    own and ours.
    """
    loaded = [*sys.modules.values()]
    if [*map(id, loaded)] != [*map(id, _loaded)]:
        _loaded[:], _told[:] = loaded, [*filter(None, map(_space, loaded))]
    own = {id(x): x for x in map(_globals_of, {type(m) for m in model.modules()})}
    told = [x for x in (*_told, *own.values()) if "type" not in x]
    for space in told:
        space["type"] = Type
    try:
        with _usual_attributes():
            yield
    finally:
        for space in told:
            space.pop("type", None)


@contextlib.contextmanager
def _usual_attributes() -> Iterator[None]:
    """The same of attributes. `__class__` and `__dict__`, which classes inherit from `object`, no
    code may set, but Python looks them up in the namespace of a class first.
    """
    before = {}
    for kind, told in _TOLD.items():
        (space,) = [x for x in gc.get_referents(kind.__dict__) if isinstance(x, dict)]
        before[kind] = space, {name: space.get(name) for name in told}
        space |= told
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(kind))
    try:
        yield
    finally:
        for kind, (space, held) in before.items():
            for name, value in held.items():
                if value is None:
                    del space[name]
                else:
                    space[name] = value
            ctypes.pythonapi.PyType_Modified(ctypes.py_object(kind))


def _class_of(x: FakeTensor) -> type[torch.Tensor]:
    """To everybody: `isinstance` asks for it thousands of times."""
    return nn.Parameter if getattr(x, "_is_param", False) else torch.Tensor


def _set_class(x: FakeTensor, kind: type) -> None:
    if not _is_kept(_asking()):
        raise RecordError(
            f"a forward makes a tensor one of {kind.__module__}.{kind.__qualname__}, and merakc "
            "records plain tensors: what its class does would be lost"
        )
    object.__dict__["__class__"].__set__(x, kind)


def _dict_of(x: FakeTensor) -> Mapping[str, Any]:
    """What users have set, which they cannot change here: it would be lost."""
    held: dict[str, Any] = torch.Tensor.__dict__["__dict__"].__get__(x)
    if _is_kept(_asking()):
        return held
    own = _fakes_own()
    return MappingProxyType({key: x for key, x in held.items() if key not in own})


def _number_of(x: Any) -> type:
    """As what a number goes that is read of tensors: `isinstance` asks for it, too."""
    return type(x) if _is_kept(_asking()) else _NUMBERS[type(x)]


def _no_text(of: Callable[[Any], Any]) -> Callable[..., Any]:
    """A text of such a number, or its hash, by which a forward may go; libraries make messages of
    them, of checks that hold, and what is printed is made a text there.
    """

    def method(x: Any, *_: Any) -> Any:
        if _is_kept(_asking()) or called_by_a_library():
            return of(x)
        raise RecordError(
            f"{user_line()}: a number that is read of the model's tensors is made a text, or a key "
            "of a mapping, and a step is compiled once for all numbers; give it to print() or to a "
            "logger as it is, or do it outside the model"
        )

    return method


_TOLD: dict[type, dict[str, Any]] = {
    FakeTensor: {"__class__": property(_class_of, _set_class), "__dict__": property(_dict_of)}
} | {
    kind: {"__class__": property(_number_of)}
    | {"__repr__": _no_text(kind.__repr__), "__format__": _no_text(kind.__repr__)}
    | {"__hash__": _no_text(kind.__hash__)}
    for kind in _NUMBERS
}


@cache
def _fakes_own() -> frozenset[str]:
    """The attributes of every parameter and tensor that is recorded."""
    with FakeTensorMode():
        some = nn.Parameter(torch.empty(0))
        return frozenset(torch.Tensor.__dict__["__dict__"].__get__(some))


def _asking() -> Any:
    """The name of the module whose code asks for an attribute, itself, by `dir`, or by asking
    whether it is one of an abstract class.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code in _PASSING:
        frame = frame.f_back
    return frame.f_globals.get("__name__") if frame is not None else None


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
