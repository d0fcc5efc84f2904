from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import merakc
from merakc.batches.dims import parse_batch_dims
from merakc.errors import ConfigError
from merakc.ir.batches import Rows
from merakc.planner.request import Request, check_request
from merakc.planner.requested import first_parts, requested
from tests.report.test_text import tiny_plan


def test_a_reading_that_does_not_divide_is_still_the_likeliest() -> None:
    """By the commonest size of dim 0 there are 5 samples, which are no 4 micro-batches."""
    batch = {"x": torch.zeros(5, 8), "y": torch.zeros(5, 8)}
    asked = requested(Request(1, 0, micro_batches=4), None, batch)
    likeliest, other, *_ = asked.readings
    assert asked.plan is None
    assert [shape for shape, _ in asked.specs] == [(5, 8), (5, 8)]
    assert (likeliest.batch_size, likeliest.batch_dims, likeliest.micro_batches) == (5, {}, 5)
    assert (other.batch_size, other.batch_dims) == (8, {"x": Rows(1), "y": Rows(1)})
    assert first_parts(other, None) == 4
    assert "5 samples does not divide into 4 micro-batches" in str(asked.undivided)
    assert "give micro_batches one of [1, 5], or, where its" in str(asked.undivided)
    with pytest.raises(ConfigError, match="5 samples does not divide into 3 micro-batches"):
        requested(Request(1, 0, micro_batches=3), None, batch)


def test_no_other_dim_is_taken_because_it_divides() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model.forward = lambda x: nn.Sequential.forward(model, x).square().mean()  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="5 samples does not divide into 4 micro-batches"):
        merakc.auto_parallel(model, torch.zeros(5, 8, 4), micro_batches=4)


def test_what_is_given_is_checked_before_the_model() -> None:
    batch = {"x": torch.zeros(5, 8)}
    request = Request(1, 0, batch_dims=parse_batch_dims({"y": 0}))
    with pytest.raises(ConfigError, match="batch_dims names 'y'"):
        requested(request, None, batch)
    with pytest.raises(ConfigError, match="state_shards 'zero-4' is not known"):
        requested(Request(1, 0, state_shards="zero-4"), None, batch)
    with pytest.raises(ConfigError, match=r"state_shards \(1, 2\) must be three numbers"):
        check_request(Request(1, 0, state_shards=(1, 2)), 4)


def test_the_batch_of_the_whole_job_divides_over_ranks() -> None:
    batch = {"x": torch.zeros(6, 8)}
    with pytest.raises(ConfigError, match="9 samples does not divide over dp=2 of 2 ranks"):
        requested(Request(2, 0, dp=2, total_batch_size=9), None, batch)
    with pytest.raises(ConfigError, match=r"batch_size is 4\.0; give the number of samples"):
        requested(Request(2, 0, dp=2, total_batch_size=4.0), None, batch)  # type: ignore[arg-type]
    plan = replace(tiny_plan(), dp=4)
    world = plan.mesh.world_size
    with pytest.raises(ConfigError, match="6 samples does not divide over the plan's dp=4"):
        requested(Request(world, 0, total_batch_size=6), plan, batch)


def test_a_batch_without_samples_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"holds no samples: .* \{'x': \[0, 8\], 'y': \[0\]\}"):
        requested(Request(1, 0), None, {"x": torch.zeros(0, 8), "y": torch.zeros(0)})
