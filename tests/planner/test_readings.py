"""Recordings of a user's forward, each made once."""

from __future__ import annotations

import torch

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
