"""What a model's Python keeps from one forward to the next, and what a forward does to it.

Attributes of modules and of the objects that they hold, containers at any depth, variables that
functions close over or share as globals, attributes of classes, generators of random numbers and
iterators.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import _lru_cache_wrapper, partial
from itertools import chain
from operator import attrgetter
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.optim import Optimizer

from merakc.frontend.python.code_names import ASKING, is_installed, names_in
from merakc.frontend.python.content import (
    CONTAINERS,
    DEPTH,
    MISSING,
    PLAIN,
    STEPPING,
    Attribute,
    Names,
    Values,
    content_of,
    is_data,
    put_back,
    same,
)
from merakc.frontend.python.remembered import Remembered
from merakc.frontend.source import INSTALLED
from merakc.frontend.values.outside import WithLoss

_ATOMS = frozenset(PLAIN)
_TENSORS = frozenset((Tensor, nn.Parameter))
_WRAPPERS = (staticmethod, classmethod, property, _lru_cache_wrapper)
_FUNCTIONS = (*_WRAPPERS, FunctionType)
STEPS = (
    "merakc.train.steps",
    "merakc.train.data.lent",
)  # what a model that is trained holds of ours
_LOOKED_INTO = ("torch.optim", "torch.distributions")  # whose objects forwards read numbers of
_CALLED = (FunctionType, MethodType, _lru_cache_wrapper)
_PARTS = attrgetter("__code__", "__defaults__", "__kwdefaults__")
_BASES = frozenset(("torch", "builtins", "merakc", "typing", "abc", "enum", "collections"))
# The hooks that torch calls around every module.
_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")


@dataclass(frozen=True, slots=True)
class Change:
    """Something that stands in another state than before; `name` is in the user's words.

    `shared` is what belongs to no module: globals, closures, attributes of classes. `part` says
    what a module has registered under the name: a parameter, a buffer or a module. `holder` is the
    object that holds it, under `key`.
    """

    name: str
    before: Any
    after: Any
    shared: bool
    part: str = ""
    holder: Any = None
    key: Any = None


class Held(NamedTuple):
    """An object and what it held; of the tensors of a module, the names alone count. `part` is what
    it holds in a module.
    """

    value: Any
    name: str
    content: Mapping[Any, Any]
    shared: bool
    part: str = ""

    @property
    def names_alone(self) -> bool:
        """Whether it holds parameters or buffers."""
        return self.part in ("parameter", "buffer")


class PythonState:
    """What the Python of a model, and of `others`, holds at one time."""

    def __init__(self, model: nn.Module, others: Iterable[type] = ()) -> None:
        self._held: dict[int, Held] = {}
        self.remembered = Remembered(_reads)
        self._classes: set[type] = set()
        self._functions: list[FunctionType] = []
        self._inside: set[tuple[int, str]] = set()  # names of modules that others look up
        self._walked: set[tuple[int, tuple[str, ...]]] = set()  # modules, and by which names
        # Modules of Python's that are held as values, and objects of torch's, in the order in which
        # they were found: of both code has what it names.
        self._by_name: dict[int, Any] = {}
        # Names that code goes by, of each namespace, with whether they are there.
        self._lookups: dict[int, tuple[dict[str, Any], dict[str, bool]]] = {}
        self._code: list[tuple[Mapping[str, Any], str]] = []  # of classes
        classes: dict[type, None] = dict.fromkeys(others)
        modules = []
        for path, module in model.named_modules():
            parts = {"parameter": module._parameters, "buffer": module._buffers}
            for part, states in {**parts, "module": module._modules}.items():
                held = self._hold(Held(states, path, dict(states), False, part))
                if held.names_alone:
                    self._see_inside(held, 0)
            modules.append(self._hold(Held(module, path, dict(vars(module)), False)))
            classes |= dict.fromkeys(type(module).__mro__)
        for held in modules:
            self._see_inside(held, 0)
        for cls in classes:
            self._see_class(cls)
        for name in _HOOKS:
            self._see(getattr(torch_modules, name), name, True)
        if isinstance(model, WithLoss) and model.loss is not None:
            self._see_called(model.loss)
        self._see_by_name()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors in it but parameters and buffers, by name."""
        for held in self._held.values():
            if not held.names_alone:
                for key, item in held.content.items():
                    if isinstance(item, Tensor):
                        yield _joined(held, key), item

    def held(self) -> Iterable[Held]:
        """All objects that it is kept in."""
        return self._held.values()

    def changes(self) -> list[Change]:
        """What was assigned, added, taken away or advanced since."""
        return [
            Change(
                _joined(held, key),
                before,
                after,
                shared=held.shared,
                part=held.part,
                holder=held.value,
                key=key,
            )
            for held in self._held.values()
            for key, before, after in differences(held)
            if not held.names_alone or MISSING in (before, after)
        ]

    def orders(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """The mappings whose keys stand in another order now, and that."""
        for held in self._held.values():
            if (now := order_of(held)) is not None:
                yield held.name, now

    def put_back(self) -> None:
        """Gives every object what it held, but for generators and iterators that have advanced."""
        for held in self._held.values():
            if order_of(held) is not None or any(True for _ in differences(held)):
                put_back(held.value, held.content)
        self.remembered.forget()

    def _see(self, value: Any, name: str, shared: bool, depth: int = 0) -> None:
        """Notes what an object holds, and goes on to the objects in it."""
        if type(value) in _ATOMS:
            return
        if isinstance(value, _FUNCTIONS):
            self._see_function(value)
        if type(value) in _TENSORS:
            value = vars(value)  # what users have set on it
        if id(value) in self._held or depth > DEPTH or type(value).__module__.startswith(STEPS):
            return
        if isinstance(value, type) and not is_installed(value.__module__):
            for cls in value.__mro__:
                self._see_class(cls)
        content = content_of(value)
        if content is None:
            if isinstance(value, ModuleType) or type(value).__module__.startswith(_LOOKED_INTO):
                self._by_name.setdefault(id(value), value)
            return
        if not is_installed(type(value).__module__):
            for cls in type(value).__mro__:
                self._see_class(cls)
        deeper = depth + (not isinstance(value, CONTAINERS))
        self._see_inside(self._hold(Held(value, name, content, shared)), deeper)

    def _see_by_name(self) -> None:
        """Notes what of modules and of torch's objects any of the code that was seen may look up;
        that of modules may lead to more code.
        """
        seen, names = -1, tuple[str, ...]()
        while self._by_name and seen != (seen := len(self._by_name) + len(self._functions)):
            names = tuple(dict.fromkeys(chain.from_iterable(map(_spoken, self._functions))))
            for value in [*self._by_name.values()]:
                if isinstance(value, ModuleType):
                    near = {} if is_installed(value.__name__) else vars(value)
                    self._see_module(value, names, near)
        for value in [*self._by_name.values()]:
            if isinstance(value, ModuleType):
                continue
            # A schedule's values where code names a method of it; an optimizer's are no forward's.
            asked = not isinstance(value, Optimizer) and any(hasattr(type(value), n) for n in names)
            every = asked or not isinstance(value, STEPPING)
            if inside := tuple(n for n in vars(value) if every or n in names):
                self._see(Values(value, inside), type(value).__name__, True)

    def _see_inside(self, held: Held, depth: int) -> None:
        for key, item in held.content.items():
            if type(item) not in _ATOMS and id(item) not in self._held:
                self._see(item, _joined(held, key), held.shared, depth)

    def _hold(self, held: Held) -> Held:
        self._held[id(held.value)] = held
        return held

    def _see_called(self, function: Any) -> None:
        """Notes what a function holds that is called beside the model, and its class."""
        self._see(function, "loss", True)
        inner = function.func if isinstance(function, partial) else function
        self._see_function(inspect.unwrap(getattr(inner, "__func__", inner)))
        for cls in type(getattr(inner, "__self__", inner)).__mro__:
            self._see_class(cls)

    def _see_class(self, cls: type) -> None:
        if cls in self._classes or cls.__module__.partition(".")[0] in _BASES:
            return
        self._classes.add(cls)
        if type(cls) is not type:
            self._see_class(type(cls))
        self._see(Names(cls), cls.__name__, True)
        for name, value in vars(cls).items():
            if not is_data(value):
                self._code.append((vars(cls), name))
            if not is_data(value) or not name.startswith("__"):  # what Python keeps there
                self._see(value, "", True)

    def _see_function(self, function: Any) -> None:
        if isinstance(function, _lru_cache_wrapper):
            self.remembered.see(function)
        if isinstance(function, _WRAPPERS):
            function = function.fget if isinstance(function, property) else function.__wrapped__
        if not isinstance(function, FunctionType) or id(function) in self._held:
            return
        if (function.__module__ or "").startswith(("torch.", "merakc.")):
            return
        self._hold(Held(function, "", {}, True))
        self._functions.append(function)
        name = function.__qualname__
        for cell, free in zip(
            function.__closure__ or (), function.__code__.co_freevars, strict=True
        ):
            self._see(cell, f"{free} of {name}", True)
        for default in function.__defaults__ or ():
            self._see(default, f"a default of {name}", True)
        self._see(function.__kwdefaults__, f"a default of {name}", True)  # a dict, or None
        self._see(vars(function), name, True)
        (names, used_here, imports), space = names_in(function.__code__), function.__globals__
        self._see(Names(space, used_here), function.__module__ or "globals", True)
        for used in used_here:
            self._looked_up(space, used, wanted=True)
        for used in names:
            self._see_named(self._looked_up(space, used), names, space)
        for module in imports:
            inside = f"{space.get('__package__')}.{module}"  # `from . import settings`
            for name in (module, inside.rstrip(".")):
                self._see_named(sys.modules.get(name), names, space)

    def _see_named(self, value: Any, names: tuple[str, ...], space: dict[str, Any]) -> None:
        """What code has by one of its `names`: a module (of which it looks some up, too), a class,
        or a function; not inside of libraries, which are large, and of Python's own.
        """
        if isinstance(value, ModuleType):
            self._see_module(value, names, space)
        elif isinstance(value, type):
            near = value.__module__ == space.get("__name__")
            for cls in value.__mro__ if near or not is_installed(value.__module__) else ():
                self._see_class(cls)
        elif isinstance(value, _CALLED):
            code = getattr(inspect.unwrap(value), "__code__", None)
            near = getattr(value, "__globals__", None) is space
            if code and (near or not code.co_filename.startswith(INSTALLED)):
                self._see_function(value)

    def _see_module(
        self, module: ModuleType, names: tuple[str, ...], space: dict[str, Any]
    ) -> None:
        inside = vars(module)
        installed = is_installed(module.__name__)  # what libraries keep is their own affair
        if not installed:
            if (id(inside), names) in self._walked:
                return
            self._walked.add((id(inside), names))
            for inner in (inside.get(n) for n in names):
                if isinstance(inner, ModuleType):  # again, for these names
                    self._see_module(inner, names, space)
            if not ASKING.isdisjoint(names):  # by a name that is made
                every = tuple(
                    n for n, x in [*inside.items()] if not n.startswith("__") and is_data(x)
                )
                self._see(Names(inside, every), module.__name__, True)
                for name in every:
                    self._looked_up(inside, name)
        names = tuple(n for n in names if (id(inside), n) not in self._inside)
        later = () if installed else tuple(n for n in names if n not in inside)
        names = tuple(n for n in names if n in inside)
        self._inside.update((id(inside), n) for n in (*names, *later))
        values = [self._looked_up(inside, n) for n in names]
        for name in later:
            self._looked_up(inside, name, wanted=True)
        held = later + tuple(
            n
            for n, v in zip(names, values, strict=True)
            if v is os.environ or isinstance(v, PLAIN) or (is_data(v) and not installed)
        )
        if held:
            self._see(Names(inside, held), module.__name__, True)
        for value in values:
            self._see_named(value, names, space)
            if value is os.getenv:
                self._see(os.environ, "os.environ", True)

    def _looked_up(self, space: dict[str, Any], name: str, *, wanted: bool = False) -> Any:
        """What stands under a name; where nothing does, it is noted only if it is `wanted`."""
        there = name in space
        if there or wanted:
            self._lookups.setdefault(id(space), (space, {}))[1][name] = there
        return space.get(name)

    def code(self) -> Iterator[Any]:
        """The functions that stand in classes, now, and the ways."""
        return chain((space.get(name) for space, name in self._code), self.ways())

    def ways(self) -> Iterator[Any]:
        """What leads from modules and functions to other objects, now."""
        found = (space.get(n) for space, names in self.lookups() for n in names)
        return chain(self.parts(), found)

    def parts(self) -> Iterator[Any]:
        """The code and the defaults of functions, now."""
        return chain.from_iterable(map(_PARTS, self._functions))

    def lookups(self) -> Iterable[tuple[dict[str, Any], dict[str, bool]]]:
        """Namespaces, and the names in them that code goes by, with whether they were there."""
        return self._lookups.values()


def _reads(function: _lru_cache_wrapper[Any]) -> Callable[[], list[str]]:
    """What says which of all that a function reads has changed from now on."""
    state = PythonState(nn.Module())
    state._see_function(function)
    state._see_by_name()
    return lambda: [change.name for change in state.changes()]


def _spoken(function: FunctionType) -> Iterable[str]:
    """The names that a function goes by; a library's do not make up names of users' modules."""
    names = names_in(function.__code__)[0]
    return (n for n in names if n not in ASKING) if is_installed(function.__module__) else names


def differences(held: Held) -> Iterator[tuple[Any, Any, Any]]:
    """Keys of what has changed, with what stood there and what stands there now."""
    before, now = held.content, content_of(held.value) or {}
    if before.keys() == now.keys() and all(map(same, before.values(), now.values())):
        return
    for key in {**before, **now}:
        old, new = before.get(key, MISSING), now.get(key, MISSING)
        if not same(old, new):
            yield key, old, new


def order_of(held: Held) -> tuple[Any, ...] | None:
    """The keys of a mapping where they stand in another order now; what is new stands last."""
    if not isinstance(held.value, dict):
        return None
    now = tuple(key for key in held.value if key in held.content)
    before = tuple(key for key in held.content if key in held.value)
    return None if now == before else now


def _joined(held: Held, key: Any) -> str:
    """The name of what an object holds: `layers.0.calls`, `self.table['x']`."""
    if key == "":
        return held.name
    if isinstance(key, Attribute):
        return f"{held.name}.{key}"
    if isinstance(held.value, CONTAINERS) and not held.part:
        return f"{held.name}[{key!r}]"
    return f"{held.name}.{key}" if held.name else str(key)
