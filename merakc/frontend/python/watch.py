"""Whether anything in what a model's Python holds has moved, told in a millisecond."""

from __future__ import annotations

import gc
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import call, is_, itemgetter
from types import CellType, FunctionType, MethodType
from typing import Any

import numpy as np
from torch import Tensor, nn

from merakc.frontend.python.content import CONTAINERS, RANDOM, Names, slots
from merakc.frontend.python.state import Change, Held, PythonState, differences, order_of
from merakc.frontend.values.outside import WithLoss

# What holds the same for ever.
_FIXED = (tuple, FunctionType, MethodType)
_EMPTY = (dict, list, set, deque, OrderedDict)
Lookups = tuple[dict[str, Any], dict[str, bool]]
"""A namespace, and names in it that code goes by, with whether they are there."""


class Watch:
    """Whether anything has been replaced, added or taken away in what is `held`.

    Objects are compared by identity, and by loops in C alone: there are thousands of them.
    """

    def __init__(self, held: Iterable[Held], lookups: Iterable[Lookups] = ()) -> None:
        self._empty: list[Any] = []
        self._named: list[dict[str, Any]] = []  # of which the names alone count
        self._whole: list[Any] = []  # dicts, lists and sets
        self._globals: list[dict[str, Any]] = []  # and what gets the names that code goes by
        self._gets: list[Callable[[Any], tuple[Any, ...]]] = []
        self._absent: list[frozenset[str]] = []  # of those that are not there
        self._lack: list[Callable[[frozenset[str]], bool]] = []
        self._cells: list[CellType] = []
        self._rest: list[Held] = []
        self._drawn: list[Held] = []  # generators of random numbers
        for one in held:
            self._add(one)
        for space, names in lookups:
            self._add_names(space, names)
        spaces = chain((s for s in self._whole if isinstance(s, dict)), self._named)
        # Texts as keys are compared as such, in half the time; others by which they are.
        self._texts = [s for s in spaces if all(type(key) is str for key in s)]
        self._before, self._there = self._told(), Same(self._items())

    def _add(self, held: Held) -> None:
        value, content = held.value, held.content
        if type(value) in _FIXED:
            return
        fields = value if type(value) is dict else getattr(value, "__dict__", None)
        if isinstance(value, RANDOM):
            self._drawn.append(held)
        elif held.names_alone:
            self._named.append(value)
        elif isinstance(value, Names):  # of a class; other namespaces are among the lookups
            self._whole += () if isinstance(value.space, dict) else (namespace(value.space),)
        elif type(value) in _EMPTY and not len(value):
            self._empty.append(value)
        elif type(value) in (list, set):
            self._whole.append(value)
        elif type(value) is CellType and content:
            self._cells.append(value)
        elif (
            type(fields) is dict and fields.keys() == content.keys() and not slots(type(value))
            and (fields is value or not isinstance(value, CONTAINERS))
        ):  # fmt: skip
            self._whole.append(fields)
        else:
            self._rest.append(held)

    def _add_names(self, space: dict[str, Any], names: dict[str, bool]) -> None:
        there = [name for name, is_there in names.items() if is_there]
        if there:
            self._globals.append(space)
            self._gets.append(itemgetter(*there, there[0]))  # a tuple, of one name too
        if len(there) < len(names):
            self._lack.append(space.keys().isdisjoint)
            self._absent.append(frozenset(names).difference(there))

    def _items(self) -> list[Any]:
        """What is compared by identity: all that stands in containers, and under names."""
        inside = gc.get_referents(*self._whole, *self._cells)
        inside += chain.from_iterable(map(call, self._gets, self._globals))
        return inside

    def _told(self) -> tuple[list[int], list[str]]:
        """What is compared by value: sizes, and keys."""
        sizes = map(len, chain(self._whole, self._named))
        return list(sizes), list(chain.from_iterable(self._texts))

    def moved(self, *, drawn: bool = True) -> bool:
        """Whether anything has; without `drawn`, generators of random numbers may."""
        rest = chain(self._rest, self._drawn if drawn else ())
        try:
            return (
                any(self._empty)
                or self._told() != self._before
                or not self._there.are(self._items())
                or not all(map(call, self._lack, self._absent))
                or any(order_of(h) is not None or any(True for _ in differences(h)) for h in rest)
            )
        except KeyError:  # a name has gone
            return True


class Same:
    """Objects, to be compared by which they are, in a sixth of the time that a loop takes."""

    def __init__(self, objects: list[Any]) -> None:
        self._objects = objects  # none of them goes, so that no other can have its address
        self._addresses = self._of(objects)

    @staticmethod
    def _of(objects: list[Any]) -> bytes:
        return np.fromiter(objects, object, len(objects)).tobytes()

    def are(self, objects: list[Any]) -> bool:
        """Whether they are these, in this order."""
        return self._of(objects) == self._addresses


class WatchedState(PythonState):
    """A state that can be taken for the next one, too, where nothing has moved in between."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._of = _parts(model)
        self._modules = list(model.modules())
        self._classes_of = list(map(type, self._modules))
        alone = [held for held in self.held() if held.names_alone]
        self._states = [(held.value, held.content) for held in alone]
        self._watch = Watch(self.held(), self.lookups())
        self._parts, self._tensors = list(self.parts()), list(super().tensors())
        self._referents = Same(gc.get_referents(*self._functions))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors in it but parameters and buffers, by name."""
        return iter(self._tensors)

    def again(self, model: nn.Module) -> WatchedState:
        """The state now; that of a model and its loss is that of the model alone, too."""
        whole, loss = _parts(model)
        same = (
            whole is self._of[0]
            and (loss is None or loss is self._of[1])
            and self._classes_of == list(map(type, self._modules))
            and all(
                len(states) == len(content) and all(map(is_, states.values(), content.values()))
                for states, content in self._states
            )
        )
        if not same or self.rewired() or self.moved():
            return WatchedState(model)
        self._caches = {function: function.cache_info() for function in self._caches}
        return self

    def moved(self, *, drawn: bool = True) -> bool:
        """Whether anything has, beside which tensors the parameters and buffers are; without
        `drawn`, generators of random numbers may.
        """
        return self._watch.moved(drawn=drawn)

    def rewired(self) -> bool:
        """Whether functions have other code or defaults than they had.

        All that they hold is looked at in one call, since to read their code runs Python's hooks.
        Where that has changed, as by annotations that somebody asks for, they are read.
        """
        now = gc.get_referents(*self._functions)
        if self._referents.are(now):
            return False
        self._referents = Same(now)
        return not all(map(is_, self.parts(), self._parts))

    def changes(self) -> list[Change]:
        """What was assigned, added, taken away or advanced since."""
        return super().changes() if self.moved() else []

    def put_back(self) -> None:
        """Gives every object what it held, but for generators and iterators that have advanced."""
        if self.moved():
            super().put_back()
            return
        self.forget()
        for states, content in self._states:
            states.update(content)


def namespace(cls: type) -> dict[str, Any]:
    """The dict behind the attributes of a class."""
    space: dict[str, Any]
    [space] = gc.get_referents(vars(cls))
    return space


def _parts(model: nn.Module) -> tuple[nn.Module, Any]:
    """A model, and the loss of its outputs if that is outside it."""
    return (model.model, model.loss) if isinstance(model, WithLoss) else (model, None)
