"""The optimum of small pipelines, and how far `auto` is from it."""

from __future__ import annotations

import pytest

from merakc.ir.costs import StageCost
from merakc.schedules.check import check_schedule
from merakc.schedules.generate import generate
from merakc.schedules.placement import place
from merakc.schedules.timing import make_pipeline, time_schedule
from tests.schedules.exact import solve_exactly
from tests.schedules.unit_costs import KEPT, unit_costs

AUTO_IS_WITHIN = 1.04


@pytest.mark.parametrize(("cap", "seconds"), [(1.2, 14.0), (1.5, 13.5), (2.0, 12.5)])
def test_auto_is_near_the_optimum(cap: float, seconds: float) -> None:
    pipeline = make_pipeline(place("v", 2, 2), unit_costs(2, 2), 4)
    capacity = [round(cap * KEPT)] * 2
    found = solve_exactly(pipeline, capacity, effort=50_000)
    assert (found.makespan_s, found.is_optimal) == (seconds, True)
    check_schedule(found.schedule)
    timing = time_schedule(found.schedule, pipeline.costs)
    assert timing.makespan_s == seconds
    assert all(a <= b for a, b in zip(timing.peak_bytes, capacity, strict=True))
    heuristic = generate([pipeline], capacity, effort=50_000)
    assert heuristic.bound_s <= found.makespan_s <= heuristic.makespan_s
    assert heuristic.makespan_s <= AUTO_IS_WITHIN * seconds


def test_links_unequal_stages_and_rounded_seconds() -> None:
    fields = {"saved_bytes": 10, "checkpoint_bytes": 1, "deferred_bytes": 6}
    costs = [StageCost(f, 2 * f, f, f, f, **fields) for f in (0.5, 0.75)]  # type: ignore[arg-type]
    pipeline = make_pipeline((0, 1), costs, 3, 0.25)
    found = solve_exactly(pipeline, [30, 30], effort=1000)
    assert found.is_optimal
    assert found.makespan_s == time_schedule(found.schedule, costs, 0.25).makespan_s
    # The second stage's three micro-batches, after the first one's forward and the message.
    assert found.bound_s >= 0.5 + 0.25 + 3 * 3 * 0.75
    odd = [StageCost(f, 2 * f, f, f, f, **fields) for f in (0.123456789, 1.0)]  # type: ignore[arg-type]
    rounded = solve_exactly(make_pipeline((0, 1), odd, 2), [30, 30], effort=1000)
    assert rounded.bound_s == 0.0
    assert not rounded.is_optimal
    check_schedule(rounded.schedule)
