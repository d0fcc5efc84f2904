"""Whether anything in what a model's Python holds has moved, told in a millisecond."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import chain
from operator import attrgetter, call, is_
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from merakc.frontend.python.content import MISSING, RANDOM, Names, slots
from merakc.frontend.python.state import Change, Held, PythonState, differences, order_of
from merakc.frontend.values.outside import WithLoss

# What holds the same for ever.
_FIXED = (tuple, FunctionType, MethodType)
_EMPTY = (dict, list, set, deque, OrderedDict)


class Watch:
    """Whether anything has been replaced, added or taken away in what is `held`.

    Objects are compared by identity, and by loops in C alone: there are thousands of them.
    """

    def __init__(self, held: Iterable[Held]) -> None:
        self._empty: list[Any] = []
        self._named: list[dict[str, Any]] = []  # of which the names alone count
        self._lists: list[list[Any]] = []
        self._dicts: list[dict[Any, Any]] = []
        self._spaces: list[Any] = []  # of classes
        self._gets: list[Callable[[str, Any], Any]] = []  # of namespaces
        self._names: list[str] = []
        self._cells: list[CellType] = []
        self._rest: list[Held] = []
        self._drawn: list[Held] = []  # generators of random numbers
        for one in held:
            self._add(one)
        self._missing = [MISSING] * len(self._names)
        self._before, self._there = self._numbers(), list(self._items())

    def _add(self, held: Held) -> None:
        value, content = held.value, held.content
        if type(value) in _FIXED:
            return
        fields = value if type(value) is dict else getattr(value, "__dict__", None)
        if isinstance(value, RANDOM):
            self._drawn.append(held)
        elif held.names_alone:
            self._named.append(value)
        elif isinstance(value, Names):
            self._add_names(value)
        elif type(value) in _EMPTY and not len(value):
            self._empty.append(value)
        elif type(value) is list:
            self._lists.append(value)
        elif type(value) is CellType and content:
            self._cells.append(value)
        elif (
            type(fields) is dict and fields.keys() == content.keys() and not slots(type(value))
            and (fields is value or not isinstance(value, Sized))
        ):  # fmt: skip
            self._dicts.append(fields)
        else:
            self._rest.append(held)

    def _add_names(self, names: Names) -> None:
        if not isinstance(names.space, dict):
            self._spaces.append(vars(names.space))
            return
        wanted = list(names.space) if names.names is None else names.names
        self._gets += [names.space.get] * len(wanted)
        self._names += wanted

    def _items(self) -> Iterator[Any]:
        """What is compared by identity: all keys, and what stands under them."""
        values = map(call, map(attrgetter("values"), chain(self._dicts, self._spaces)))
        inside = chain(self._dicts, self._spaces, values, self._lists, self._named)
        found = map(call, self._gets, self._names, self._missing)
        cells = map(attrgetter("cell_contents"), self._cells)
        return chain(chain.from_iterable(inside), found, cells)

    def _numbers(self) -> list[int]:
        """What is compared by value."""
        return list(map(len, chain(self._dicts, self._lists, self._spaces, self._named)))

    def moved(self, *, drawn: bool = True) -> bool:
        """Whether anything has; without `drawn`, generators of random numbers may."""
        rest = chain(self._rest, self._drawn if drawn else ())
        try:
            return (
                any(self._empty)
                or self._numbers() != self._before
                or not all(map(is_, self._items(), self._there))
                or any(order_of(h) is not None or any(True for _ in differences(h)) for h in rest)
            )
        except ValueError:  # a cell is empty now
            return True


class WatchedState(PythonState):
    """A state that can be taken for the next one, too, where nothing has moved in between."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._of = _parts(model)
        self._modules = list(model.modules())
        self._classes_of = list(map(type, self._modules))
        alone = [held for held in self.held() if held.names_alone]
        self._states = [(held.value, held.content) for held in alone]
        self._watch = Watch(self.held())
        self._way, self._tensors = list(self.ways()), list(super().tensors())

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
        """Whether functions and modules lead to other objects than they did."""
        return not all(map(is_, self.ways(), self._way))

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


def _parts(model: nn.Module) -> tuple[nn.Module, Any]:
    """A model, and the loss of its outputs if that is outside it."""
    return (model.model, model.loss) if isinstance(model, WithLoss) else (model, None)
