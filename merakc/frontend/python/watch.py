"""Whether anything in what a model's Python holds has moved, told in a fraction of a millisecond.

CPython counts how often a dict was changed (PEP 509), and torch's compiler has a call that tells
it. Where no count has moved, no dict was written to, and what it holds is not looked at: with that
a look took twice as long. Where one has, and where torch has no such call any more, all that is in
the dicts is compared.
"""

from __future__ import annotations

import gc
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, compress, count
from operator import is_, itemgetter, ne
from types import CellType, FunctionType, MethodType
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch._C._dynamo import guards

from merakc.frontend.python.content import CONTAINERS, RANDOM, Names, slots
from merakc.frontend.python.state import Change, Held, PythonState, differences, order_of
from merakc.frontend.values.outside import parted

_NUMBERS = count()
dict_version: Callable[[dict[Any, Any]], int] = getattr(
    guards,
    "dict_version",
    lambda _: next(_NUMBERS),  # as if it had changed
)
# What holds the same for ever.
_FIXED = (tuple, FunctionType, MethodType)
_EMPTY = (dict, list, set, deque, OrderedDict)
Lookups = tuple[dict[str, Any], dict[str, bool]]
"""A namespace, and names in it that code goes by, with whether they are there."""


class _Lookup:
    """A namespace, and the names in it that code goes by."""

    def __init__(self, space: dict[str, Any], names: dict[str, bool]) -> None:
        there = [name for name, is_there in names.items() if is_there]
        self.space = space
        self._absent = frozenset(names).difference(there)
        self._get = itemgetter(*there, there[0]) if there else lambda _: ()  # a tuple, of one too
        self._there = Same(self._get(space))

    def moved(self) -> bool:
        """Whether another object has one of the names."""
        if not self.space.keys().isdisjoint(self._absent):
            return True
        try:
            return not self._there.are(self._get(self.space))
        except KeyError:  # a name has gone
            return True


class Watch:
    """Whether anything has been replaced, added or taken away in what is `held`.

    Objects are compared by identity, and by loops in C alone: there are thousands of them.
    """

    def __init__(self, held: Iterable[Held], lookups: Iterable[Lookups] = ()) -> None:
        self._empty: list[Any] = []
        self._named: list[dict[str, Any]] = []  # of which the names alone count
        self._dicts: list[dict[Any, Any]] = []
        self._others: list[Any] = []  # lists and sets
        self._cells: list[CellType] = []
        self._rest: list[Held] = []
        self._drawn: list[Held] = []  # generators of random numbers
        for one in held:
            self._add(one)
        spaces = self._dicts + self._named
        self._counted = [space for space in spaces if type(space) is dict]
        self._uncounted = [space for space in spaces if type(space) is not dict]
        # Texts as keys are compared as such, in half the time; others by which they are.
        self._texts = [space for space in spaces if all(type(key) is str for key in space)]
        self._versions = self._versions_now()
        self._keys, self._values = self._keys_now(), Same(gc.get_referents(*self._dicts))
        self._sizes = list(map(len, self._others))
        self._inside = Same(gc.get_referents(*self._others, *self._cells))
        spaces_and_names = list(lookups)
        self._spaces = [space for space, _ in spaces_and_names]
        self._looked_up = list(map(dict_version, self._spaces))
        self._lookups = [_Lookup(*each) for each in spaces_and_names]

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
            self._dicts += () if isinstance(value.space, dict) else (namespace(value.space),)
        elif type(value) in _EMPTY and not len(value):
            self._empty.append(value)
        elif type(value) in (list, set):
            self._others.append(value)
        elif type(value) is CellType and content:
            self._cells.append(value)
        elif (
            type(fields) is dict and fields.keys() == content.keys() and not slots(type(value))
            and (fields is value or not isinstance(value, CONTAINERS))
        ):  # fmt: skip
            self._dicts.append(fields)
        else:
            self._rest.append(held)

    def _versions_now(self) -> list[Any]:
        """How often dicts were changed, and of other mappings the names."""
        return [*map(dict_version, self._counted), *map(tuple, self._uncounted)]

    def _keys_now(self) -> tuple[list[int], list[str]]:
        """Of each dict how many there are, and those that are texts."""
        sizes = map(len, chain(self._dicts, self._named))
        return list(sizes), list(chain.from_iterable(self._texts))

    def moved(self, *, drawn: bool = True) -> bool:
        """Whether anything has; without `drawn`, generators of random numbers may."""
        rest = chain(self._rest, self._drawn if drawn else ())
        return (
            any(self._empty)
            or list(map(len, self._others)) != self._sizes
            or not self._inside.are(gc.get_referents(*self._others, *self._cells))
            or self._dicts_moved()
            or self._names_moved()
            or any(order_of(h) is not None or any(True for _ in differences(h)) for h in rest)
        )

    def _dicts_moved(self) -> bool:
        versions = self._versions_now()
        if versions == self._versions:
            return False
        if self._keys_now() != self._keys or not self._values.are(gc.get_referents(*self._dicts)):
            return True
        self._versions = versions
        return False

    def _names_moved(self) -> bool:
        versions = list(map(dict_version, self._spaces))
        if versions == self._looked_up:
            return False
        if any(one.moved() for one in compress(self._lookups, map(ne, versions, self._looked_up))):
            return True
        self._looked_up = versions
        return False


class Same:
    """Objects, to be compared by which they are, in a sixth of the time that a loop takes."""

    def __init__(self, objects: Sequence[Any]) -> None:
        self._objects = objects  # none of them goes, so that no other can have its address
        self._addresses = self._of(objects)

    @staticmethod
    def _of(objects: Sequence[Any]) -> bytes:
        return np.fromiter(objects, object, len(objects)).tobytes()

    def are(self, objects: Sequence[Any]) -> bool:
        """Whether they are these, in this order."""
        return self._of(objects) == self._addresses


class WatchedState(PythonState):
    """A state that can be taken for the next one, too, where nothing has moved in between."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._of = parted(model)
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
        whole, loss = parted(model)
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
        self.remembered.again()
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
        for states, content in self._states:
            states.update(content)
        self.remembered.forget()


def namespace(cls: type) -> dict[str, Any]:
    """The dict behind the attributes of a class."""
    space: dict[str, Any]
    [space] = gc.get_referents(vars(cls))
    return space
