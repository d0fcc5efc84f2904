"""Whether an optimizer's step runs: within one, what a rank holds is updated as plain tensors."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from functools import cache, wraps
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle


class _State(threading.local):
    """The frame of the optimizer's step that runs in a thread, if one does."""

    frame: FrameType | None = None


_state = _State()


def is_stepping() -> bool:
    """Whether a step runs; one that ended in an error has left its frame here."""
    if _state.frame is None:
        return False
    try:
        _state.frame.clear()
    except RuntimeError:  # it is executing
        return True
    _state.frame = None
    return False


@contextmanager
def stepping() -> Iterator[None]:
    """A step that is taken without hooks."""
    _state.frame = sys._getframe(2)
    try:
        yield
    finally:
        _state.frame = None


def is_closure(given: Any) -> bool:
    """Whether an argument of a step is what it calls back."""
    return callable(given) and not isinstance(given, (torch.Tensor, torch.nn.Module))


def _aside(closure: Any) -> Any:
    """What a step calls back: what it does with parameters is no part of the step."""
    if not is_closure(closure):
        return closure

    @wraps(closure)
    def run(*args: Any, **kwargs: Any) -> Any:
        frame, _state.frame = _state.frame, None
        try:
            return closure(*args, **kwargs)
        finally:
            _state.frame = frame

    return run


@cache
def watch_optimizers() -> None:
    """Has steps noted from here on, without what users' own hooks do before and behind them.
    Whether an optimizer may update what a rank holds is tried before its first.
    """
    register_optimizer_step_pre_hook(_note)


behind: list[Callable[[Optimizer], None]] = []  # what looks at an optimizer after its steps
_hooks: WeakKeyDictionary[Optimizer, tuple[RemovableHandle, RemovableHandle]]
_hooks = WeakKeyDictionary()


def _note(optimizer: Optimizer, *_: Any) -> None:
    """Puts its own hooks nearest to the step."""
    every: Any = optimizer._optimizer_step_pre_hooks  # ordered
    after: Any = optimizer._optimizer_step_post_hooks
    own = _hooks.get(optimizer)
    if own is None or own[0].id not in every or own[1].id not in after:
        first = optimizer.register_step_pre_hook(_begin)
        own = _hooks[optimizer] = first, optimizer.register_step_post_hook(_end)
    every.move_to_end(own[0].id)
    after.move_to_end(own[1].id, last=False)


def _begin(
    _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if not is_stepping():
        _state.frame = sys._getframe(1)
    given = {name: _aside(value) for name, value in kwargs.items()}
    return (args[0], *(_aside(value) for value in args[1:])), given


def _end(optimizer: Optimizer, *_: Any) -> None:
    if _state.frame is sys._getframe(1):
        _state.frame = None
        for look in behind:
            look(optimizer)


def step_of(optimizer: Optimizer, wanted: Set[torch.Tensor]) -> None:
    """The step of an optimizer for some of its parameters, without anybody's hooks."""
    part = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name != "step":  # which schedulers put there
            vars(part)[name] = OrderedDict() if name.endswith("_hooks") else value
    part.param_groups = [
        group | {"params": [p for p in group["params"] if p in wanted]}
        for group in optimizer.param_groups
    ]
    with stepping():
        type(optimizer).step.__wrapped__(part)  # type: ignore[attr-defined]


def settings_now(optimizer: Optimizer) -> list[dict[str, Any]]:
    """All that its groups say, as it is now, and its own numbers."""
    own = {n: v for n, v in vars(optimizer).items() if not n.startswith("_")}
    given = [own, *optimizer.param_groups]
    left_out = ("params", "param_groups", "state", "step")
    found = [{n: _as_now(v) for n, v in each.items() if n not in left_out} for each in given]
    return [*found, *({"": [*map(id, g["params"])]} for g in optimizer.param_groups)]


def _as_now(value: Any) -> Any:
    """A copy of numbers, and of what holds them; what is something else, as it is."""
    if isinstance(value, (list, tuple)):
        return [_as_now(each) for each in value]
    if isinstance(value, dict):
        return {name: _as_now(each) for name, each in value.items()}
    is_number = isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
    return value.clone() if is_number else value


def alike(one: Any, other: Any) -> bool:
    """Whether settings are the same."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    if one is other or (one != one and other != other):  # or NaN
        return True
    return type(one) is type(other) and bool(one == other)
