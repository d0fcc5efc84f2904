from __future__ import annotations

import pytest
import torch

from merakc.batch_dims import parse_batch_dims
from merakc.errors import ConfigError
from merakc.ir.batches import Rows
from merakc.requested import first_parts, requested
from merakc.search import Request


def test_readings_that_divide_are_left() -> None:
    """By the commonest size of dim 0 there would be 5 samples, which are no 4 micro-batches."""
    batch = {"x": torch.zeros(5, 8), "y": torch.zeros(5, 8)}
    given, found, specs = requested(Request(1, 0, micro_batches=4), None, batch)
    assert given is None
    assert [shape for shape, _ in specs] == [(5, 8), (5, 8)]
    assert found[0].batch_size == 8
    assert found[0].batch_dims == {"x": Rows(1), "y": Rows(1)}
    assert first_parts(found[0], None) == 4
    with pytest.raises(ConfigError, match="5 samples does not divide into 3 micro-batches"):
        requested(Request(1, 0, micro_batches=3), None, batch)


def test_what_is_given_is_checked_before_the_model() -> None:
    batch = {"x": torch.zeros(5, 8)}
    request = Request(1, 0, batch_dims=parse_batch_dims({"y": 0}))
    with pytest.raises(ConfigError, match="batch_dims names 'y'"):
        requested(request, None, batch)
