"""What a model's steps are compiled with beside batches: its modes, and what its Python holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from operator import call, is_
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from merakc.frontend.python.content import (
    CONTAINERS,
    RANDOM,
    Names,
    content_hash,
    describe,
)
from merakc.frontend.python.state import Change, Held, PythonState, differences

# What never changes, and what advances by itself: a forward that draws from it is refused.
_UNWATCHED = (tuple, FunctionType, MethodType, *RANDOM)


class Settings:
    """The modes of a model's modules, and all that its forward can see in Python.

    It is looked at before every step, which takes a fraction of a millisecond where nothing has
    changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules = tuple(model.modules())  # to walk through them takes a step's time
        self._things: list[Any] = []  # what is told apart by identity
        self._key: tuple[tuple[str, str], ...] = ()
        self._begin()

    def _begin(self) -> None:
        self._first = self._look()
        self._written = {name: (x, _version(x)) for name, x in self._first.tensors()}
        self._before = self._key  # what was changed until then

    def modes(self) -> tuple[bool, ...]:
        """Which modules are in training mode."""
        return tuple([module.training for module in self._modules])

    def changed(self) -> tuple[tuple[str, str], ...]:
        """What is otherwise than at first, and how: the same where a forward sees the same."""
        if self._watch.moved():
            self._look()
            found = {c.name: c.after for c in self._first.changes() if self._counts(c)}
            written = {n: x for n, (x, before) in self._written.items() if _version(x) != before}
            told = {n: repr(describe(x, self._leaf)) for n, x in (written | found).items()}
            self._key = (*self._before, *sorted(told.items()))
        return self._key

    @property
    def seen(self) -> tuple[tuple[str, str], ...]:
        """What was `changed` at the last look."""
        return self._key

    def settle(self) -> None:
        """Takes what has changed since the last look for something that a step itself has done."""
        if self._watch.moved():
            self._begin()

    def _look(self) -> PythonState:
        self._last = PythonState(self._model)
        self._watch = _Watch(self._last)
        return self._last

    def _counts(self, change: Change) -> bool:
        return not (
            (change.key == "training" and isinstance(change.after, bool))
            or isinstance(change.holder, _UNWATCHED)
        )

    def _leaf(self, thing: Any) -> str | int:
        """What is told of tensors, and of objects that are not looked into: which one it is."""
        if isinstance(thing, Tensor):
            return content_hash(thing)
        known = (k for k, x in enumerate(self._things) if x is thing)
        number = next(known, len(self._things))
        if number == len(self._things):
            self._things.append(thing)
        return number


class _Watch:
    """Whether anything in a state has been replaced, added or taken away.

    Objects are compared by identity, and by loops in C alone: there are thousands of them.
    """

    def __init__(self, state: PythonState) -> None:
        self._empty: list[Any] = []
        self._lists: list[list[Any]] = []
        self._dicts: list[dict[Any, Any]] = []
        self._gets: list[Callable[[str], Any]] = []  # of namespaces
        self._names: list[str] = []
        self._rest: list[Held] = []
        for held in state.held():
            self._add(held)
        self._tensors = [x for _, x in state.tensors()]
        self._before, self._there = self._numbers(), list(self._items())

    def _add(self, held: Held) -> None:
        value, content = held.value, held.content
        fields = value if isinstance(value, dict) else getattr(value, "__dict__", None)
        if isinstance(value, _UNWATCHED):
            return
        if isinstance(value, Names):
            space = value.space if isinstance(value.space, dict) else vars(value.space)
            self._gets += [space.get] * len(content)
            self._names += content
        elif isinstance(value, CONTAINERS) and not len(value):
            self._empty.append(value)
        elif isinstance(fields, dict) and len(fields) == len(content):
            self._dicts.append(fields)
        elif type(value) is list:
            self._lists.append(value)
        else:
            self._rest.append(held)

    def _items(self) -> Iterator[Any]:
        """What is compared by identity. A key that is new stands last."""
        last = map(next, map(reversed, self._dicts))
        inside = chain.from_iterable(chain(map(dict.values, self._dicts), self._lists, [last]))
        return chain(inside, map(call, self._gets, self._names))

    def _numbers(self) -> list[int]:
        """What is compared by value."""
        lengths = map(len, chain(self._dicts, self._lists))
        return [*lengths, *map(_version, self._tensors)]

    def moved(self) -> bool:
        """Whether anything has."""
        return (
            any(self._empty)
            or self._numbers() != self._before
            or not all(map(is_, self._items(), self._there))
            or any(any(True for _ in differences(held)) for held in self._rest)
        )


def _version(tensor: Tensor) -> int:
    """How often a tensor was written to."""
    return 0 if tensor.is_inference() else tensor._version
