"""Calls on the outputs of a model, noted as they are made, and made again when the forward runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode

from merakc.errors import ConfigError
from merakc.frontend.calls.forms import new_fake_mode
from merakc.frontend.source import user_line
from merakc.train.outside.deferred import Deferred, deferred_in
from merakc.train.outside.noted import PLAIN, Extra, Noted, Slot, forward, key_of
from merakc.train.outside.watching import (
    REMEDY,
    OnACopy,
    Sizes,
    Watched,
    WritesError,
    makes_new,
    memory,
    named,
    with_open_size,
    writes,
)
from merakc.train.settings import marks

_OF_VALUES = DataDependentOutputException, DynamicOutputShapeException
# One of all, so that the calls on outputs of several calls of a model may be put together.
_fake_mode = functools.cache(new_fake_mode)
Made = Callable[[int], Deferred]


class ValuesWantedError(Exception):
    """A call that cannot be noted: it wants the values of its arguments."""


@dataclass(eq=False)
class Tape:
    """The calls so far. `forms` are like the value at each place, without values: first the outputs
    of the model, then what calls give.
    """

    forms: list[torch.Tensor]
    device: torch.device
    calls: list[Noted] = field(default_factory=list)
    extras: list[torch.Tensor] = field(default_factory=list)
    marks: list[tuple[int, int, bool]] = field(default_factory=list)  # of these, when read
    makers: dict[int, Noted] = field(default_factory=dict)  # by place
    mode: FakeTensorMode | None = None  # where a call was noted
    own: set[int] = field(default_factory=set)  # places of values that are surely no views
    copied: bool = False  # whether the last call has copied a tensor as it is
    shown: WeakValueDictionary[int, Deferred] = field(default_factory=WeakValueDictionary)

    def __post_init__(self) -> None:
        """Counts the outputs."""
        self.outputs = len(self.forms)

    def join(self, other: Tape, given: tuple[Any, Any], autocast: tuple[torch.dtype, bool]) -> int:
        """Adds another call of the model with what it was `given`, and the calls on its outputs.
        Returns the place of the first of these.
        """
        self._open()
        other._open()
        first = len(self.forms)

        def extra(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                return Extra(self._number(leaf, marks(leaf)))
            return _plain(leaf, forward)

        args, kwargs = pytree.tree_map(extra, given)
        key = key_of(forward, args, kwargs, True, autocast)
        called = Noted(forward, args, kwargs, first, key, True, autocast, user_line())
        pairs = zip(other.extras, other.marks, strict=True)
        numbers = {k: self._number(*pair) for k, pair in enumerate(pairs)}
        moved = {id(noted): noted.moved(first, numbers) for noted in other.calls}
        self.forms += other.forms
        self.calls += [called, *moved.values()]
        self.makers |= dict.fromkeys(range(first, first + other.outputs), called)
        self.makers |= {first + place: moved[id(n)] for place, n in other.makers.items()}
        self.own |= {first + place for place in other.own}
        return first

    def _open(self) -> None:
        """Gives what stands for values the mode in which calls on them are run."""
        if self.mode is None:
            self.mode = _fake_mode()
            self.forms = [self._fake_output(x) for x in self.forms]

    def note(self, func: Callable[..., Any], args: Any, kwargs: Any, made: Made) -> Any:
        """What the call returns, with a tensor `made` for each place in it. A tensor that it writes
        into stands for what is written there from then on.

        Raises `ValuesWantedError` where values are wanted for it, `ConfigError` where that would
        not help.
        """
        self._open()
        assert self.mode is not None
        args = with_open_size(func, args)
        try:
            out, faked = self._seen(func, args, kwargs, self.mode, self._fake_of)
        except WritesError as error:
            return self._write(func, args, kwargs, error.target)
        except ValuesWantedError as error:
            if not isinstance(error.__cause__, _OF_VALUES):
                raise
            sizes = Sizes()  # type: ignore[no-untyped-call]
            try:
                out, faked = self._seen(func, args, kwargs, sizes, self._known_of)
            except WritesError:
                raise ConfigError(writes(func)) from None
        leaves, structure = pytree.tree_flatten(out)
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        if not tensors or any(not isinstance(x, (torch.Tensor, type(None))) for x in leaves):
            raise ConfigError(
                f"{named(func)} of an output of the model, before loss.backward(), gives no "
                f"tensor: a compiled step would not hear of it; {REMEDY}"
            )
        if all(id(x) in faked for x in tensors):
            kept = [faked[id(x)][1] if isinstance(x, torch.Tensor) else x for x in leaves]
            return pytree.tree_unflatten(kept, structure)
        fresh = [t for _, t in faked.values() if not isinstance(t, Deferred)]
        first = self._add(func, args, kwargs, fresh, tensors)
        known = {memory(f) for f, _ in faked.values()}
        if len(tensors) == 1 and memory(tensors[0]) not in known and makes_new(func, self.copied):
            self.own.add(first)
        places = iter(range(first, first + len(tensors)))
        shown = [made(next(places)) if isinstance(x, torch.Tensor) else x for x in leaves]
        return pytree.tree_unflatten(shown, structure)

    def _write(
        self, func: Callable[..., Any], args: Any, kwargs: Any, written: torch.Tensor
    ) -> Deferred:
        """The tensor that a call writes into, at another place from here on, where it alone has its
        memory: no output of the model, which may be a view, and no view is alive.
        """
        target = next(iter(deferred_in(args[:1])), None)
        place = target.place if target is not None and target.place in self.own else -1
        shared = [p for p in self.shown if p != place and memory(self.forms[p]) == memory(written)]
        if target is None or place < 0 or shared or memory(self.forms[place]) != memory(written):
            raise ConfigError(writes(func))

        def moved(new: int) -> Deferred:
            if _form(self.forms[new]) != _form(self.forms[place]):
                raise ConfigError(writes(func))
            del self.shown[place]
            target.place, self.shown[new] = new, target
            return target

        self.note(OnACopy(func), args, kwargs, moved)
        return target

    def _seen(
        self,
        func: Callable[..., Any],
        args: Any,
        kwargs: Any,
        mode: TorchDispatchMode,
        stand_in: Callable[[torch.Tensor, Callable[..., Any]], torch.Tensor],
    ) -> tuple[Any, dict[int, tuple[torch.Tensor, Any]]]:
        """What the call returns on what stands in for its tensors; and by their ids what does, each
        with the tensor.
        """
        faked: dict[int, tuple[torch.Tensor, Any]] = {}

        def fake(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return _plain(leaf, func)
            found = next((f for f, t in faked.values() if t is leaf), None)
            if found is None:
                found = stand_in(leaf, func)
                faked[id(found)] = found, leaf
            if isinstance(leaf, Deferred):
                _check_history(leaf, found, func)
            return found

        given, named = pytree.tree_map(fake, (args, kwargs))
        out = self._run(func, given, named, faked.values(), mode)
        if not torch.is_grad_enabled():  # where views of fake tensors keep their history
            out = pytree.tree_map_only(
                torch.Tensor, lambda x: x if id(x) in faked else x.detach(), out
            )
        return out, faked

    def _run(
        self,
        func: Callable[..., Any],
        args: Any,
        kwargs: Any,
        faked: Collection[tuple[torch.Tensor, Any]],
        mode: TorchDispatchMode,
    ) -> Any:
        """What the call returns on tensors that stand for those beside them."""
        before = [f._version for f, _ in faked]
        watched = Watched([f for f, leaf in faked if isinstance(leaf, Deferred)])
        try:
            with mode, watched:
                out = func(*args, **kwargs)
        except WritesError:
            raise
        except Exception as error:
            raise ValuesWantedError from error
        self.copied = watched.copies
        if watched.drawn:
            raise ConfigError(
                f"{named(func)} draws random numbers from outputs of the model, outside it: they "
                f"would be others on every layout; {REMEDY}"
            )
        if any(now._version != old for old, (now, _) in zip(before, faked, strict=True)):
            raise ValuesWantedError
        return out

    def _known_of(self, tensor: torch.Tensor, func: Callable[..., Any]) -> torch.Tensor:
        """A tensor with the values that sizes may follow from, where it is none of numbers that the
        model has computed. Collective where the model has chosen them.
        """
        found = self._fake_of(tensor, func)
        if not isinstance(tensor, Deferred):
            return tensor.detach().clone()
        if tensor.is_floating_point() or tensor.is_complex():
            return found
        return tensor.source.value(tensor.place).clone()

    def _fake_of(self, tensor: torch.Tensor, func: Callable[..., Any]) -> torch.Tensor:
        if isinstance(tensor, Deferred):
            return self.forms[tensor.place]
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            raise ValuesWantedError
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ConfigError(
                f"{named(func)} puts an output of the model together with a tensor that requires "
                "a gradient, which no step would give it: make it a part of the model, whose "
                "forward returns the loss"
            )
        assert self.mode is not None
        with self.mode:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )

    def _fake_output(self, like: torch.Tensor) -> torch.Tensor:
        assert self.mode is not None
        with self.mode, torch.enable_grad():
            made = torch.empty(like.shape, dtype=like.dtype, device=self.device)
            return made.requires_grad_().clone() if like.requires_grad else made

    def _add(
        self,
        func: Callable[..., Any],
        args: Any,
        kwargs: Any,
        fresh: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
    ) -> int:
        numbers = {id(t): self._number(t, marks(t)) for t in fresh}

        def slot(leaf: Any) -> Any:
            if isinstance(leaf, Deferred):
                return Slot(leaf.place)
            return Extra(numbers[id(leaf)]) if isinstance(leaf, torch.Tensor) else leaf

        given, named = pytree.tree_map(slot, (args, kwargs))
        autocast = (
            torch.get_autocast_dtype(self.device.type),
            torch.is_autocast_enabled(self.device.type),
        )
        grad, first = torch.is_grad_enabled(), len(self.forms)
        key = key_of(func, given, named, grad, autocast)
        noted = Noted(func, given, named, first, key, grad, autocast, user_line())
        self.calls.append(noted)
        self.forms += tensors
        self.makers |= dict.fromkeys(range(first, len(self.forms)), noted)
        return first

    def _number(self, tensor: torch.Tensor, mark: tuple[int, int, bool]) -> int:
        """That of a tensor of the user's."""
        found = next((k for k, t in enumerate(self.extras) if t is tensor), len(self.extras))
        if found == len(self.extras):
            self.extras.append(tensor)
            self.marks.append(mark)
        return found

    def behind(self, places: Collection[int]) -> list[Noted]:
        """The calls that values at these places follow from, in their order."""
        wanted, found = set(places), []
        for noted in reversed(self.calls):
            if any(self.makers.get(p) is noted for p in wanted):
                wanted |= noted.reads()
                found.append(noted)
        return found[::-1]

    def check_unchanged(self, calls: Sequence[Noted]) -> None:
        """Raises `ConfigError` where a tensor that calls have read was written to since."""
        for number in {k for c in calls for k in c.extras()}:
            if marks(self.extras[number]) != self.marks[number]:
                raise ConfigError(
                    f"a tensor of shape {list(self.extras[number].shape)} that the loss is made "
                    "with was written to before loss.backward(); give the loss a copy of it"
                )


def _check_history(leaf: Deferred, fake: torch.Tensor, func: Callable[..., Any]) -> None:
    if leaf.requires_grad != fake.requires_grad:
        raise ConfigError(
            f"{named(func)} reads an output of the model that a custom autograd.Function has "
            f"returned, or whose requires_grad was set, outside the model; {REMEDY}"
        )


def _plain(leaf: Any, func: Callable[..., Any]) -> Any:
    if not isinstance(leaf, PLAIN):
        raise ConfigError(
            f"{named(func)} of an output of the model is given a {type(leaf).__name__}, which a "
            f"compiled step cannot tell from another; {REMEDY}"
        )
    return leaf


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad
