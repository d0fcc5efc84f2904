"""What one object of Python's holds, as far as it is state: to be compared, described, put back."""

from __future__ import annotations

import array
import ctypes
import enum
import gc
import hashlib
import inspect
import itertools
import logging
import random
import warnings
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    GeneratorType,
    GenericAlias,
    MappingProxyType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from merakc.errors import RecordError
from merakc.files.elements import bytes_of

PLAIN = (
    bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size,
    enum.Enum, range, slice,
)  # fmt: skip
MISSING: Any = object()
# Larger arrays are told apart by a hash, and cannot be put back.
MAX_ARRAY_BYTES = 2**20
MOST_TYPES = 1024  # of which is known whether they are code
# Objects in objects that are looked into: deeper ones are a library's own affairs.
DEPTH = 6
STEPPING = (Optimizer, LRScheduler)  # which change with every step
RANDOM = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
CONTAINERS = (dict, list, tuple, set, deque)
_BYTES = (bytearray, array.array)
# As of ctypes and multiprocessing.Value, which cannot be put back.
_MEMORY: Any = (memoryview, ctypes.c_int.__base__, ctypes.Array, ctypes.Structure, ctypes.Union)
_ADVANCING = ("builtins", "itertools")  # where the iterators are that say where they stand
# Iterators that hold another's, which says where they stand.
_PASSING_ON = tuple(getattr(itertools, n) for n in ("pairwise", "batched") if hasattr(itertools, n))
_CLOSED = (FunctionType, ModuleType, type, GenericAlias, Tensor, logging.Logger)
_NO_CONTENT = (*PLAIN, *_CLOSED)
# What names stand for that hold nothing: which of it a name stands for is another matter.
_CODE = (
    FunctionType, BuiltinFunctionType, ModuleType, type, GenericAlias, logging.Logger,
    staticmethod, classmethod, property,
)  # fmt: skip


class Attribute(str):
    """The name of an attribute of an object that holds items too."""

    __slots__ = ()


@dataclass(frozen=True, eq=False, slots=True)
class Names:
    """Names of a namespace: the globals that a function uses, or all attributes of a class."""

    space: Any
    names: tuple[str, ...] | None = None

    def content(self) -> dict[str, Any]:
        """The names and values of a namespace, now, that are state."""
        space = self.space if isinstance(self.space, dict) else vars(self.space)
        names = [n for n in space if not n.startswith("__")] if self.names is None else self.names
        return {n: space[n] for n in names if n in space and is_data(space[n])}


def is_torchs(value: Any) -> bool:
    """Whether an object is of a class of torch's, and no module."""
    return type(value).__module__.startswith("torch.") and not isinstance(value, nn.Module)


@dataclass(frozen=True, eq=False, slots=True)
class Values:
    """What an object of torch's holds, such as a distribution, under these of its names: plain
    values, and tensors; of optimizers and schedules plain values alone.
    """

    value: Any
    names: tuple[str, ...]

    def content(self) -> dict[str, Any]:
        """They, now, by the way to each, as `param_groups[0]['lr']`."""
        found: dict[str, Any] = {}
        kinds = PLAIN if isinstance(self.value, STEPPING) else (*PLAIN, Tensor)
        inside = {n: x for n, x in vars(self.value).items() if n in self.names}
        _add_values(found, kinds, "", inside, 0)
        return found


def _add_values(
    found: dict[str, Any], kinds: tuple[type, ...], way: str, value: Any, depth: int
) -> None:
    if isinstance(value, kinds):
        found[way] = value
        return
    if is_torchs(value) and not isinstance(value, STEPPING):
        value = getattr(value, "__dict__", {})
    if depth < DEPTH and isinstance(value, (dict, list, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            _add_values(found, kinds, f"{way}[{key!r}]" if depth else str(key), item, depth + 1)


def is_data(value: Any) -> bool:
    """Whether a name stands for something else than code."""
    kind: Any = type(value)
    return not _is_code(kind)


@lru_cache(maxsize=MOST_TYPES)
def _is_code(kind: type) -> bool:
    return issubclass(kind, _CODE)


def content_of(value: Any) -> dict[Any, Any] | None:
    """What an object holds, one level deep; None of one that is not looked into."""
    if isinstance(value, dict):
        # Of a class that makes what it is asked for, what it has.
        kind: Any = OrderedDict if isinstance(value, OrderedDict) else dict
        return dict(kind.items(value)) | _attributes(value)
    if isinstance(value, (list, tuple, deque)):
        return dict(enumerate(value)) | _attributes(value)
    if isinstance(value, set):
        return dict.fromkeys(value, True) | _attributes(value)
    if isinstance(value, (Names, Values)):
        return value.content()
    if isinstance(value, MappingProxyType):
        return dict(value)
    if isinstance(value, weakref.ref):
        return {"": value()}
    if isinstance(value, (CellType, ContextVar)):
        return _cell(value)
    if isinstance(value, MethodType):
        return {"": value.__self__, "func": value.__func__}
    if isinstance(value, partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords}
    told = _told(value)
    if isinstance(value, np.ndarray):
        objects = enumerate(value.ravel().tolist()) if value.dtype == object else ()
        return {"": told, "form": f"{value.dtype} {value.shape}", **{str(k): x for k, x in objects}}
    if told is not None:
        return {"": told}
    if is_torchs(value) or isinstance(value, _NO_CONTENT):
        return None
    if type(value).__module__ == "_io" and hasattr(value, "getvalue"):
        return {"": value.getvalue()}
    found = {n: getattr(value, n) for n in slots(type(value)) if hasattr(value, n)}
    found |= getattr(value, "__dict__", {})
    return found if found or hasattr(value, "__dict__") else None


def _told(value: Any) -> Any:
    """The content of an object that is no container, as something to compare; None for others."""
    if isinstance(value, np.ndarray):
        small = value.nbytes <= MAX_ARRAY_BYTES
        return value.tobytes() if small else hashlib.sha256(value.tobytes()).hexdigest()
    if isinstance(value, _BYTES):
        return bytes(value)
    if isinstance(value, _MEMORY):
        return memoryview(value).tobytes()
    if isinstance(value, RANDOM) and not isinstance(value, random.SystemRandom):
        return _random_state(value)
    if isinstance(value, GeneratorType):
        place = value.gi_frame.f_lasti if value.gi_frame else None
        return f"{place} {describe(inspect.getgeneratorlocals(value))}"
    if isinstance(value, itertools.count):
        return repr(value)
    if isinstance(value, Iterator) and type(value).__module__ in _ADVANCING:
        return _stand(value)
    return None


def _stand(value: Iterator[Any]) -> str:
    """Where an iterator of Python's stands.

    Raises `RecordError` for one that does not say: it would give other values in each forward.
    """
    if type(value) in _PASSING_ON:
        return repr(describe(gc.get_referents(value)))
    try:
        with warnings.catch_warnings():  # those of itertools say it until Python 3.14
            warnings.simplefilter("ignore", DeprecationWarning)
            return repr(describe(value.__reduce__()[1:]))
    except TypeError:
        raise RecordError(
            f"the model holds a {type(value).__name__}, and Python does not say where it stands; "
            "hold a list and a number, or a generator function's iterator"
        ) from None


def slots(cls: type) -> list[str]:
    """The attributes that a class has places for."""
    found = []
    for base in cls.__mro__:
        slots = vars(base).get("__slots__", ())
        found += [slots] if isinstance(slots, str) else list(slots)
    return [name for name in found if not name.startswith("__")]


def _attributes(value: Any) -> dict[Attribute, Any]:
    if type(value) in CONTAINERS:
        return {}
    names = slots(type(value)) + ["default_factory"] * isinstance(value, defaultdict)
    found = {name: getattr(value, name) for name in names if hasattr(value, name)}
    return {Attribute(name): x for name, x in (found | getattr(value, "__dict__", {})).items()}


def _cell(cell: CellType | ContextVar[Any]) -> dict[Any, Any]:
    try:
        return {"": cell.get() if isinstance(cell, ContextVar) else cell.cell_contents}
    except (ValueError, LookupError):  # nothing is in it yet
        return {}


def _random_state(value: Any) -> str:
    if isinstance(value, random.Random):
        return repr(value.getstate())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr([np.asarray(part).tolist() for part in value.get_state()])
    return str(value.get_state().numpy().tobytes())


def content_hash(tensor: Tensor) -> str:
    """A hash of a tensor's form and elements."""
    form = f"{tensor.dtype} {tuple(tensor.shape)}"
    if tensor.is_meta:
        return form
    data = bytes_of(tensor).numpy().tobytes()
    return f"{form} {hashlib.sha256(data).hexdigest()}"


def describe(value: Any, leaf: Callable[[Any], Any] | None = None) -> Any:
    """All of a value but the identity of its objects and the numbers in its tensors; `leaf` says
    something else of tensors, of modules, and of objects that are not looked into. What an
    object holds is a hash: objects that many hold are looked into once for each depth.
    """
    return _described(value, leaf, 0, frozenset(), {})


def _described(
    value: Any, leaf: Callable[[Any], Any] | None, depth: int, seen: frozenset[int],
    known: dict[tuple[int, int], tuple[Any, str]],
) -> Any:  # fmt: skip
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, Tensor):
        return leaf(value) if leaf else ("tensor", tuple(value.shape), value.dtype)
    if leaf and isinstance(value, nn.Module):  # of which the state is held by itself
        return type(value), leaf(value)
    key = id(value), depth
    if key in known:
        return type(value), known[key][1]
    content = None if depth > DEPTH or id(value) in seen else content_of(value)
    if content is None:
        return type(value), leaf(value) if leaf and id(value) not in seen else None
    within, deeper = seen | {id(value)}, depth + (not isinstance(value, CONTAINERS))
    inner = [(str(k), _described(v, leaf, deeper, within, known)) for k, v in content.items()]
    known[key] = value, hashlib.sha256(repr(inner).encode()).hexdigest()  # which keeps its id
    return type(value), known[key][1]


def same(old: Any, new: Any) -> bool:
    """Whether a value is the object that stood there before, or equals it and is plain."""
    if old is new:
        return True
    plain = type(old) is type(new) and isinstance(old, PLAIN)
    if isinstance(old, (float, complex)):  # 0.0 is -0.0, and divides otherwise
        return plain and repr(old) == repr(new)
    return plain and bool(old == new or (old != old and new != new))


def put_back(value: Any, content: Mapping[Any, Any]) -> None:
    """Gives an object what it held, unless it is one that advances."""
    items = {k: v for k, v in content.items() if not isinstance(k, Attribute)}
    if isinstance(value, CONTAINERS) and type(value) not in CONTAINERS:
        for name in _attributes(value).keys() - content.keys():
            object.__delattr__(value, str(name))
        for name in content.keys() - items.keys():
            object.__setattr__(value, str(name), content[name])
    if isinstance(value, dict):
        base: Any = OrderedDict if isinstance(value, OrderedDict) else dict
        base.clear(value)
        for key, item in items.items():
            base.__setitem__(value, key, item)
    elif isinstance(value, list):
        value[:] = items.values()
    elif isinstance(value, (set, deque)):
        value.clear()
        (value.update if isinstance(value, set) else value.extend)(
            items if isinstance(value, set) else items.values()
        )
    elif isinstance(value, bytearray):
        value[:] = content[""]
    elif isinstance(value, array.array):
        del value[:]
        value.frombytes(content[""])
    elif isinstance(value, ContextVar):
        value.set(content.get(""))
    elif isinstance(value, CellType):
        if "" in content:
            value.cell_contents = content[""]
    elif isinstance(value, Names):
        _name_again(value, content)
    elif isinstance(value, np.ndarray) and isinstance(content[""], bytes):
        value[...] = np.frombuffer(content[""], value.dtype).reshape(value.shape)
    elif not isinstance(value, _NOT_PUT_BACK) and "" not in content:
        _set_attributes(value, content)


# What cannot be put back, or holds what others do.
_NOT_PUT_BACK = (tuple, partial, MethodType, MappingProxyType, np.ndarray, Values)


def _set_attributes(value: Any, content: Mapping[str, Any]) -> None:
    own = slots(type(value))
    for name in own:
        if name in content:
            object.__setattr__(value, name, content[name])
        elif hasattr(value, name):
            object.__delattr__(value, name)
    if hasattr(value, "__dict__"):
        vars(value).clear()
        vars(value).update({n: v for n, v in content.items() if n not in own})


def _name_again(names: Names, content: Mapping[str, Any]) -> None:
    for name in {**names.content(), **content}:
        if isinstance(names.space, dict):
            if name in content:
                names.space[name] = content[name]
            else:
                del names.space[name]
        elif name in content:
            setattr(names.space, name, content[name])
        else:
            delattr(names.space, name)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in a value, in containers and objects too; each is looked into once."""
    level, seen = [value], dict[int, Any]()  # with what has the id, which another might get
    for depth in range(DEPTH + 2):
        below: list[Any] = []
        for one in level:
            if isinstance(one, Tensor):
                yield one
            elif not isinstance(one, PLAIN) and depth <= DEPTH and id(one) not in seen:
                seen[id(one)] = one
                below += (content_of(one) or {}).values()
        level = below
