"""Stages on ranks."""

from __future__ import annotations

from benchmarks.schedules import split_stages
from merakc.ir.costs import StageCost
from merakc.schedules.placement import place


def test_places() -> None:
    assert place("plain", 3) == (0, 1, 2)
    assert place("interleaved", 3, 2) == (0, 1, 2, 0, 1, 2)
    assert place("v", 3, 2) == (0, 1, 2, 2, 1, 0)
    assert place("v", 2, 3) == (0, 1, 1, 0, 0, 1)


def test_chunks_keep_the_sum_in_the_order_of_the_model() -> None:
    costs = [StageCost(float(k), 2.0 * k, saved_bytes=10 * k, static_bytes=k) for k in (1, 2)]
    chunks = split_stages(costs, 4)
    assert len(chunks) == 8
    assert chunks[3] == StageCost(0.25, 0.5, saved_bytes=3, static_bytes=1)  # 10 / 4, rounded up
    assert chunks[4] == StageCost(0.5, 1.0, saved_bytes=5, static_bytes=1)
    assert split_stages(costs, 1) == tuple(costs)


def test_every_figure_is_divided() -> None:
    cost = StageCost(**{f: 6.0 if f.endswith("_s") else 6 for f in StageCost.__slots__})
    half = StageCost(**{f: 3.0 if f.endswith("_s") else 3 for f in StageCost.__slots__})
    assert split_stages([cost], 2) == (half, half)
    assert split_stages([StageCost(1, 2)], 2)[0] == StageCost(0.5, 1.0)  # seconds are no integers
