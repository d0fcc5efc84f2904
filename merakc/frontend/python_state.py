"""What a model's Python keeps from one forward to the next, and what a forward does to it.

Attributes of modules and of the objects that they hold, containers at any depth, variables that
functions close over or share as globals, attributes of classes, generators of random numbers.
"""

from __future__ import annotations

import enum
import inspect
import logging
import random
import sysconfig
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import _lru_cache_wrapper, cache, partial
from itertools import count
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

PLAIN = (
    bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size,
    enum.Enum, range, slice,
)  # fmt: skip
# Objects in objects that are looked into: deeper ones are a library's own affairs.
DEPTH = 6
# Larger arrays are told apart by identity alone: to copy them would take a recording's time.
MAX_ARRAY_BYTES = 2**20
_ATOMS = frozenset(PLAIN) | {Tensor, nn.Parameter}
_RANDOM = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_CONTAINERS = (dict, list, tuple, set, deque)
_STATE = (*PLAIN, *_CONTAINERS, *_RANDOM, Tensor, np.ndarray, count)
_CLOSED = (FunctionType, ModuleType, type, Tensor, logging.Logger)
_WRAPPERS = (staticmethod, classmethod, property, _lru_cache_wrapper)
# Where functions lie that are not followed from others: libraries are large, and Python's own.
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib"))
_MISSING: Any = object()


@dataclass(frozen=True, eq=False, slots=True)
class _Names:
    """Names of a namespace: the globals that a function uses, or all attributes of a class."""

    space: Any
    names: tuple[str, ...] | None = None

    def content(self) -> dict[str, Any]:
        """What they are now, as far as it is state."""
        space = self.space if isinstance(self.space, dict) else vars(self.space)
        names = [n for n in space if not n.startswith("__")] if self.names is None else self.names
        return {n: space[n] for n in names if n in space and _is_state(space[n], self.space)}


@dataclass(frozen=True, slots=True)
class Change:
    """Something that stands in another state than before; `name` is in the user's words.

    `shared` is what belongs to no module: globals, closures, attributes of classes.
    """

    name: str
    before: Any
    after: Any
    shared: bool


@dataclass(frozen=True, slots=True)
class _Held:
    """An object and what it held; of the tensors of a module, the names alone count."""

    value: Any
    name: str
    content: Mapping[Any, Any]
    shared: bool
    names_alone: bool = False


class PythonState:
    """What a model's Python holds at one time."""

    def __init__(self, model: nn.Module) -> None:
        self._held: dict[int, _Held] = {}
        self._caches: dict[Any, Any] = {}
        classes: dict[type, None] = {}
        modules = []
        for path, module in model.named_modules():
            for states in (module._parameters, module._buffers):
                self._hold(_Held(states, path, dict(states), False, names_alone=True))
            modules.append(self._hold(_Held(module, path, dict(vars(module)), False)))
            classes |= dict.fromkeys(type(module).__mro__)
        for held in modules:
            self._see_inside(held, 0)
        for cls in classes:
            if cls is not object and not cls.__module__.startswith("torch."):
                self._see(_Names(cls), cls.__name__, True)
                for value in vars(cls).values():
                    self._see(value, "", True)

    def changes(self) -> list[Change]:
        """What was assigned, added, taken away or advanced since."""
        return [
            Change(_joined(held, key), before, after, held.shared)
            for held in self._held.values()
            for key, before, after in _differences(held)
            if not held.names_alone or _MISSING in (before, after)
        ]

    def put_back(self) -> None:
        """Gives every object what it held, but for generators and iterators that have advanced."""
        self.forget()
        for held in self._held.values():
            if any(True for _ in _differences(held)):
                _put_back(held.value, held.content)

    def forget(self) -> None:
        """Empties the caches of functions (`functools.lru_cache`) that were filled since."""
        for function, before in self._caches.items():
            if function.cache_info() != before:
                function.cache_clear()

    def _see(self, value: Any, name: str, shared: bool, depth: int = 0) -> None:
        """Notes what an object holds, and goes on to the objects in it."""
        if isinstance(value, (*_WRAPPERS, FunctionType)):
            self._see_function(value)
        if type(value) in _ATOMS or id(value) in self._held or depth > DEPTH:
            return
        content = _content(value)
        if content is None:
            return
        self._see_inside(self._hold(_Held(value, name, content, shared)), depth)

    def _see_inside(self, held: _Held, depth: int) -> None:
        for key, item in held.content.items():
            if type(item) not in _ATOMS and id(item) not in self._held:
                self._see(item, _joined(held, key), held.shared, depth + 1)

    def _hold(self, held: _Held) -> _Held:
        self._held[id(held.value)] = held
        return held

    def _see_function(self, function: Any) -> None:
        if isinstance(function, _lru_cache_wrapper):
            self._caches[function] = function.cache_info()
        if isinstance(function, _WRAPPERS):
            function = function.fget if isinstance(function, property) else function.__wrapped__
        if not isinstance(function, FunctionType) or id(function) in self._held:
            return
        if (function.__module__ or "").startswith("torch."):
            return
        self._hold(_Held(function, "", {}, True))
        name = function.__qualname__
        for cell, free in zip(
            function.__closure__ or (), function.__code__.co_freevars, strict=True
        ):
            self._see(cell, f"{free} of {name}", True)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._see(default, f"a default of {name}", True)
        self._see(vars(function), name, True)
        names, space = _global_names(function.__code__), function.__globals__
        self._see(_Names(space, names), function.__module__ or "globals", True)
        for used in names:
            helper = space.get(used)
            found = [vars(helper).get(n) for n in names] if isinstance(helper, ModuleType) else []
            for callee in (helper, *found):  # `mask(...)`, or `helpers.mask(...)`
                code = getattr(inspect.unwrap(callee) if callable(callee) else 0, "__code__", None)
                same = getattr(callee, "__globals__", None) is space
                if code and (same or not code.co_filename.startswith(_INSTALLED)):
                    self._see_function(callee)


def describe(value: Any, depth: int = 0) -> Any:
    """All of a value but the identity of its objects and the numbers in its tensors."""
    if isinstance(value, Tensor):
        return "tensor", tuple(value.shape), value.dtype
    content = None if isinstance(value, PLAIN) or depth > DEPTH else _content(value)
    if content is None:
        return type(value), value if isinstance(value, PLAIN) else None
    return type(value), tuple((str(k), describe(v, depth + 1)) for k, v in content.items())


def _content(value: Any) -> dict[Any, Any] | None:
    """What an object holds, one level deep; None of one that is not looked into."""
    if isinstance(value, dict):
        return dict(dict.items(value))  # of a class that makes what it is asked for, what it has
    if isinstance(value, (list, tuple, deque)):
        return dict(enumerate(value))
    if isinstance(value, set):
        return dict.fromkeys(value, True)
    if isinstance(value, _Names):
        return value.content()
    if isinstance(value, CellType):
        return _cell(value)
    if isinstance(value, MethodType):
        return {"": value.__self__}
    if isinstance(value, partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords}
    if isinstance(value, np.ndarray):
        return {"": value.tobytes()} if value.nbytes <= MAX_ARRAY_BYTES else None
    if isinstance(value, count):
        return {"": repr(value)}
    if isinstance(value, _RANDOM) and not isinstance(value, random.SystemRandom):
        return {"": _random_state(value)}
    own = type(value).__module__.startswith("torch.") and not isinstance(value, nn.Module)
    if own or isinstance(value, _CLOSED) or not hasattr(value, "__dict__"):
        return None
    return dict(vars(value))


def _cell(cell: CellType) -> dict[Any, Any]:
    try:
        return {"": cell.cell_contents}
    except ValueError:  # nothing is in it yet
        return {}


def _random_state(value: Any) -> str:
    if isinstance(value, random.Random):
        return repr(value.getstate())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr([np.asarray(part).tolist() for part in value.get_state()])
    return str(value.get_state().numpy().tobytes())


def _is_state(value: Any, space: Any) -> bool:
    """Whether a shared value is something that a forward may keep things in."""
    if isinstance(value, _STATE):
        return True
    own = isinstance(space, dict) and type(value).__module__ == space.get("__name__")
    return own and not isinstance(value, type)


@cache
def _global_names(code: CodeType) -> tuple[str, ...]:
    inner = [c for c in code.co_consts if isinstance(c, CodeType)]
    return tuple(dict.fromkeys([*code.co_names, *(n for c in inner for n in _global_names(c))]))


def _differences(held: _Held) -> Iterator[tuple[Any, Any, Any]]:
    """Keys of what has changed, with what stood there and what stands there now."""
    before, now = held.content, _content(held.value) or {}
    if len(before) == len(now) and all(map(_same, before.values(), now.values())):
        return
    for key in {**before, **now}:
        old, new = before.get(key, _MISSING), now.get(key, _MISSING)
        if not _same(old, new):
            yield key, old, new


def _same(old: Any, new: Any) -> bool:
    if old is new:
        return True
    plain = type(old) is type(new) and isinstance(old, PLAIN)
    return plain and bool(old == new or (old != old and new != new))


def _joined(held: _Held, key: Any) -> str:
    """The name of what an object holds: `layers.0.calls`, `self.table['x']`."""
    if key == "":
        return held.name
    if isinstance(held.value, (dict, list, tuple, deque, set)) and not held.names_alone:
        return f"{held.name}[{key!r}]"
    return f"{held.name}.{key}" if held.name else str(key)


def _put_back(value: Any, content: Mapping[Any, Any]) -> None:
    if isinstance(value, dict):
        base: Any = OrderedDict if isinstance(value, OrderedDict) else dict
        base.clear(value)
        for key, item in content.items():
            base.__setitem__(value, key, item)
    elif isinstance(value, list):
        value[:] = content.values()
    elif isinstance(value, (set, deque)):
        value.clear()
        (value.update if isinstance(value, set) else value.extend)(
            content if isinstance(value, set) else content.values()
        )
    elif isinstance(value, CellType):
        if "" in content:
            value.cell_contents = content[""]
    elif isinstance(value, _Names):
        _name_again(value, content)
    elif isinstance(value, np.ndarray):
        value[...] = np.frombuffer(content[""], value.dtype).reshape(value.shape)
    elif not isinstance(value, (tuple, count, partial, MethodType, *_RANDOM)):
        vars(value).clear()
        vars(value).update(content)


def _name_again(names: _Names, content: Mapping[str, Any]) -> None:
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


def tensors_in(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """The tensors in a value, in containers and objects too."""
    if isinstance(value, Tensor):
        yield value
    elif not isinstance(value, PLAIN) and depth <= DEPTH:
        for item in (_content(value) or {}).values():
            yield from tensors_in(item, depth + 1)
