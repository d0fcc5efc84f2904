"""Stages on ranks."""

from __future__ import annotations

from merakc.ir.costs import StageCost
from merakc.schedules.placement import place, split_stages


def test_places() -> None:
    assert place("plain", 3) == (0, 1, 2)
    assert place("interleaved", 3, 2) == (0, 1, 2, 0, 1, 2)
    assert place("v", 3, 2) == (0, 1, 2, 2, 1, 0)
    assert place("v", 2, 3) == (0, 1, 1, 0, 0, 1)


def test_chunks_keep_the_sum_in_the_order_of_the_model() -> None:
    costs = [StageCost(float(k), 2.0 * k, 1.0, 1.0, 3.0, 0.5, *[10 * k] * 6) for k in (1, 2)]
    chunks = split_stages(costs, 4)
    assert len(chunks) == 8
    assert chunks[3] == StageCost(0.25, 0.5, 0.25, 0.25, 0.75, 0.125, *[3] * 6)  # 10 / 4, upwards
    assert chunks[4] == StageCost(0.5, 1.0, 0.25, 0.25, 0.75, 0.125, *[5] * 6)
    assert split_stages(costs, 1) == tuple(costs)
