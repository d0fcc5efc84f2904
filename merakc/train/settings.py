"""What a model's steps are compiled with beside batches: its modes, and what its Python holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, count
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from merakc.frontend.python.content import (
    RANDOM,
    content_hash,
    describe,
)
from merakc.frontend.python.remembered import keep_remembered
from merakc.frontend.python.state import Change
from merakc.frontend.python.watch import WatchedState
from merakc.runtime.part import OfAWhole, plain
from merakc.runtime.state import crc_of

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
        self._with_modes = frozenset(map(id, self._modules))
        self._things: list[Any] = []  # what is told apart by identity
        self._key: tuple[tuple[str, str], ...] = ()
        self._told: tuple[tuple[str, str], ...] | None = None
        self.seen: tuple[tuple[bool, ...], tuple[tuple[str, str], ...]] = (), ()  # at the last look
        self._begin()

    def _begin(self) -> None:
        self._first = self._look()
        self._code = list(self._first.code())
        self._written = {name: (x, marks(x)) for name, x in self._first.tensors()}
        self._kept = {name: (x, marks(x)) for name, x in self._first.remembered.tensors()}
        self._before = self._key  # what was changed until then

    @contextmanager
    def looked_at(self) -> Iterator[tuple[tuple[str, str], ...]]:
        """What is `changed` now; while this lasts the next to ask is told so without a look."""
        self._told = self.changed()
        try:
            yield self._told
        finally:
            self._told = None

    def now(self) -> tuple[tuple[bool, ...], tuple[tuple[str, str], ...]]:
        """The modes, and what is `changed`."""
        self.seen = self.modes(), self.changed()
        return self.seen

    def modes(self) -> tuple[bool, ...]:
        """Which modules are in training mode."""
        return tuple([module.training for module in self._modules])

    def set_modes(self, modes: Iterable[bool]) -> None:
        """Puts modules into modes that they were in."""
        for module, mode in zip(self._modules, modes, strict=True):
            module.training = mode

    def changed(self) -> tuple[tuple[str, str], ...]:
        """What is otherwise than at first, and how: the same where a forward sees the same."""
        if (known := self._told) is not None:
            self._told = None
            return known
        if self._moved():
            self._look()
            found = {c.name: c.after for c in self._first.changes() if self._counts(c)}
            written = {n: x for n, (x, before) in self._written.items() if marks(x) != before}
            for name, x in self.state.remembered.tensors():
                kept, before = self._kept.setdefault(name, (x, marks(x)))
                if kept is not x or before != marks(x):
                    written[name] = x
            code = zip(count(), self._code, self._first.code(), strict=False)
            others = {f"code {k}": now for k, before, now in code if now is not before}
            found |= {f"order of {name}": keys for name, keys in self._first.orders()}
            told = {n: repr(describe(x, self._leaf)) for n, x in (written | found | others).items()}
            self._key = tuple(sorted((dict(self._before) | told).items()))
        return self._key

    def keep(self) -> None:
        """A step runs: what functions with caches gave while it was compiled holds from now on."""
        if keep_remembered():
            for name, x in self.state.remembered.tensors():
                self._kept.setdefault(name, (x, marks(x)))
            self._versions = self._marks()

    def settle(self) -> None:
        """Takes what has changed since the last look for something that a step itself has done."""
        if self._moved():
            self._begin()

    def _look(self) -> WatchedState:
        self.state = WatchedState(self._model)
        self._versions = self._marks()
        return self.state

    def _marks(self) -> list[tuple[int, int, bool]]:
        return [marks(x) for _, x in chain(self.state.tensors(), self.state.remembered.tensors())]

    def _moved(self) -> bool:
        """Whether anything has been replaced, added, taken away or written to since."""
        moved = self.state.moved(drawn=False) or self.state.rewired()
        return moved or self._marks() != self._versions

    def _counts(self, change: Change) -> bool:
        return not (
            (change.key == "training" and id(change.holder) in self._with_modes)
            or isinstance(change.holder, _UNWATCHED)
        )

    def _leaf(self, thing: Any) -> str | int:
        """What is told of tensors, and of objects that are not looked into: which one it is.
        Of what a rank holds of a tensor likewise, and how often it was written to: the numbers are
        other ones on each rank.
        """
        is_part = isinstance(thing, OfAWhole)
        if isinstance(thing, Tensor) and not is_part:
            return content_hash(thing) + " with a gradient" * thing.requires_grad
        known = (k for k, x in enumerate(self._things) if x is thing)
        number = next(known, len(self._things))
        if number == len(self._things):
            self._things.append(thing)
        return f"part {number}, {marks(thing)[0]}" if is_part else number


def marks(tensor: Tensor) -> tuple[int, int, bool]:
    """How often a tensor was written to, and whether it requires a gradient. Writes by `.data` or
    NumPy are not counted: of a tensor on the CPU, a checksum too (30 GB/s).
    """
    # A mode of the user's does not see it, nor do tensors that stand for others.
    with _disable_current_modes(), torch._C.DisableTorchFunctionSubclass():
        version = 0 if tensor.is_inference() else tensor._version
        return version, _checksum(tensor), tensor.requires_grad


def _checksum(tensor: Any) -> int:
    """Of a tensor's elements; of one that is made of others, of theirs; 0 if they can't be read."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return hash(tuple(_checksum(getattr(tensor, name)) for name in names))
    empty = torch._C._dispatch_keys(tensor).has("Python")
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or empty:
        return 0
    if tensor.is_nested or tensor.is_quantized:
        return crc_of(torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()))
    return crc_of(plain(tensor).resolve_conj().resolve_neg())
