"""What is seen to move in a state that is taken for the next one, too."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from merakc.frontend.python import watch
from merakc.frontend.python.watch import WatchedState
from tests.frontend.python.test_state import CHANGES, Keeps


@pytest.fixture(params=["versions of dicts", "no versions"], autouse=True)
def versions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's call for versions of dicts, and where torch has none."""
    if request.param == "no versions":
        numbers = count()
        monkeypatch.setattr(watch, "dict_version", lambda _: next(numbers))


def _again_and_again(holder: Any) -> None:
    for k in range(300):  # CPython specialises what a loop does
        holder.scale = k


WRITES: dict[str, Callable[[Any, dict[str, Any]], object]] = {
    "an item": lambda m, d: d.__setitem__("x", 2),
    "a new item": lambda m, d: d.setdefault("new", 1),
    "an update": lambda m, d: d.update(x=2),
    "a union": lambda m, d: d.__ior__({"x": 2}),
    "a pop": lambda m, d: d.pop("x"),
    "another order": lambda m, d: d.update(x=d.pop("x")),
    "another key of the same value": lambda m, d: d.update(z=d.pop("y")),
    "a clear": lambda m, d: d.clear(),
    "an attribute": lambda m, d: setattr(m, "scale", 2),
    "an attribute, past the module": lambda m, d: object.__setattr__(m, "scale", 2),
    "an attribute, by its dict": lambda m, d: vars(m).update(scale=2),
    "an attribute, in a loop": lambda m, d: _again_and_again(m),
    "an attribute of an object": lambda m, d: setattr(m.holder, "scale", 2),
    "one of an object, in a loop": lambda m, d: _again_and_again(m.holder),
    "one of an object that goes": lambda m, d: delattr(m.holder, "scale"),
}


@pytest.mark.parametrize("name", WRITES)
def test_every_way_to_write_is_seen(name: str) -> None:
    model = nn.Module()
    model.scale, model.table, model.holder = 1, {"x": 1, "y": 5}, SimpleNamespace(scale=1)
    state = WatchedState(model)
    model.table["x"] = model.scale = model.holder.scale = 1  # as they are
    assert not state.moved()
    model.table["y"] = 6
    assert state.moved()
    model.table["y"] = 5
    assert not state.moved()
    WRITES[name](model, model.table)
    assert state.moved()


@pytest.mark.parametrize("name", CHANGES)
def test_what_has_moved_is_looked_at_anew(name: str) -> None:
    model = Keeps()
    state = WatchedState(model)
    assert state.again(model) is state
    assert state.changes() == []
    CHANGES[name][0](model)
    assert state.changes() != []
    later = state.again(model)
    assert later is not state
    assert later.changes() == []
    state.put_back()
    assert state.changes() == []


def test_parameters_are_put_back_and_new_ones_looked_at() -> None:
    model = Keeps()
    state, weight = WatchedState(model), model.layer.weight
    model.layer._parameters["weight"] = nn.Parameter(torch.ones(2, 2))
    assert state.changes() == []
    assert state.again(model) is not state
    state.put_back()
    assert model.layer.weight is weight


def test_what_goes_from_one_container_into_the_next_is_seen() -> None:
    model = nn.Module()
    model.one, model.other = [1, 2], [3]
    state = WatchedState(model)
    assert not state.moved()
    model.other.insert(0, model.one.pop())  # all that is held stands in the same order
    assert state.moved()


def test_equal_values_are_told_apart() -> None:
    model = nn.Module()
    model.scale, model.table = 1, {"x": 1}
    for value in (True, 1.0, 1):
        state = WatchedState(model)
        assert not state.moved()
        model.scale = value
        assert state.moved()
    state = WatchedState(model)
    model.table = dict(model.table)
    assert state.moved()
