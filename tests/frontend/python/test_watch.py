"""What is seen to move in a state that is taken for the next one, too."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from merakc.frontend.python.watch import WatchedState
from tests.frontend.python.test_state import CHANGES, Keeps


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
