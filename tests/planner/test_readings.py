"""Recordings of a user's forward, each made once."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from merakc.frontend.python.watch import WatchedState
from merakc.planner.readings import Readings
from merakc.planner.request import Request
from merakc.planner.requested import requested
from tests.small_source import small


def test_a_forward_is_recorded_once_for_each_size_of_part() -> None:
    model, batch = small()
    asked = requested(Request(2, 0, dp=2, micro_batches=2), None, batch)
    forward = Readings(model, batch, asked, torch.device("cpu"))
    assert forward.request is asked.readings[0]
    assert not forward.needs_values()
    assert asked.likely_dp == 2
    parts = forward.in_parts(2)
    assert parts.graph is forward.first.graph is forward.of_samples(2).graph
    assert forward.in_parts(2, dp=1).graph is not parts.graph
    (other,) = [i for i in forward.of_samples(3).graph.inputs if i.target == "x"]
    assert other.spec.shape == (3, 8)  # four samples do not divide into such parts


def test_a_batch_of_another_size_is_recorded_as_if_it_had_been_given() -> None:
    model, batch = small()
    asked = requested(Request(1, 0), None, batch)
    forward = Readings(model, batch, asked, torch.device("cpu"))
    assert forward.of_size(4) is forward
    for samples in (2, 6):
        other = forward.of_size(samples)
        assert other.request.batch_size == samples
        assert other.example[1]["x"].shape[0] == samples
        assert other.first.layout.total == samples


def test_what_the_models_python_holds_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all recordings: until something has moved, or it is let go of with the model's weights."""
    model, batch = small()
    asked = requested(Request(2, 0, dp=2, micro_batches=2), None, batch)
    forward = Readings(model, batch, asked, torch.device("cpu"))
    looks: list[nn.Module] = []
    look = WatchedState.__init__

    def counted(state: WatchedState, model: nn.Module) -> None:
        looks.append(model)
        look(state, model)

    monkeypatch.setattr(WatchedState, "__init__", counted)
    forward.in_parts(2)
    forward.in_parts(4)
    assert len(looks) == 1
    model.added = {"by": "the user"}
    forward.of_samples(3)
    assert len(looks) == 2
    forward.compared.forget()
    held = {id(x) for x in gc.get_referrers(next(model.parameters())) if type(x) is dict}
    assert held <= {id(m._parameters) for m in model.modules()}
