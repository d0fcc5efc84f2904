"""Improved orders: never longer, never over the cap, still complete."""

from __future__ import annotations

from dataclasses import replace

import pytest

from merakc.schedules.check import check_schedule
from merakc.schedules.improve import (
    drop_recomputations,
    fuse_backwards,
    local_search,
    makespan_s,
)
from merakc.schedules.placement import place
from merakc.schedules.registry import make_schedule
from merakc.schedules.text import parse_schedule
from merakc.schedules.timing import Pipeline, make_pipeline, peak_bytes, recomputed_units
from merakc.schedules.work import Work, decode, encode
from tests.schedules.unit_costs import KEPT, UNIT, peak, unit_costs, unit_time


def pipeline_of(name: str, ranks: int, m: int) -> tuple[Pipeline, list[list[Work]]]:
    schedule = make_schedule(name, ranks, m, recompute="full")
    costs = unit_costs(ranks, schedule.stages // ranks)
    return make_pipeline(schedule.rank_of, costs, m), encode(schedule)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "v-half"])
@pytest.mark.parametrize("cap", [1.3, 2.0, 3.1, 99.0])
def test_recomputations_that_memory_does_not_need(name: str, cap: float) -> None:
    pipeline, orders = pipeline_of(name, 4, 8)
    capacity = [int(cap * KEPT)] * 4
    peaks = [peak_bytes(pipeline, rank, order) for rank, order in enumerate(orders)]
    dropped = drop_recomputations(pipeline, orders, capacity)
    check_schedule(decode(name, pipeline.rank_of, dropped, 8))
    for rank, order in enumerate(dropped):
        assert peak_bytes(pipeline, rank, order) <= max(capacity[rank], peaks[rank])
        for unit in recomputed_units(order):  # none of those that are left can go
            without = [work for work in order if work != (4, unit)]
            assert peak_bytes(pipeline, rank, without) > capacity[rank]
    left = sum(len(recomputed_units(order)) for order in dropped)
    assert (left == 0) == (peak(unit_time(make_schedule(name, 4, 8))) <= cap)
    assert makespan_s(pipeline, dropped) < makespan_s(pipeline, orders)


def test_temporary_bytes_count() -> None:
    costs = [replace(UNIT, forward_peak_bytes=1200, recompute_peak_bytes=1200)]
    pipeline = make_pipeline((0,), costs, 2)
    orders = encode(parse_schedule("0F0 0F1 0R0 0B0 0R1 0B1"))
    # Without 0R1, 0R0 stands on 1050 bytes, so that 0R0 alone can go below 2250.
    for capacity, left in ((1049, {0, 1}), (2249, {1}), (2250, set())):
        (order,) = drop_recomputations(pipeline, orders, [capacity])
        assert recomputed_units(order) == left, capacity
        if left != {0, 1}:
            assert peak_bytes(pipeline, 0, order) <= capacity


def test_halves_side_by_side_become_one_backward_where_that_is_no_slower() -> None:
    orders = encode(parse_schedule("0F0 0I0 0W0 0F1 0I1 0F2 0W1 0I2 0W2"))
    pipeline = make_pipeline((0,), [UNIT], 3)
    assert decode("", (0,), fuse_backwards(pipeline, orders), 3) == parse_schedule(
        "0F0 0B0 0F1 0I1 0F2 0W1 0B2", ""
    )
    slow = make_pipeline((0,), [replace(UNIT, backward_s=2.1)], 3)
    assert fuse_backwards(slow, orders) == orders


def test_local_search_mends_an_order() -> None:
    # All weight gradients before the gradients that others wait for.
    text = "0F0 0F1 0I0 0W0 0I1 0W1; 1F0 1I0 1W0 1F1 1I1 1W1; 2F0 2I0 2W0 2F1 2I1 2W1"
    pipeline = make_pipeline(place("plain", 3), unit_costs(3), 2)
    orders = encode(parse_schedule(text))
    capacity = [2 * KEPT] * 3
    found = local_search(pipeline, orders, capacity, 300)
    check_schedule(decode("", pipeline.rank_of, found, 2))
    assert makespan_s(pipeline, found) < makespan_s(pipeline, orders)
    assert found == local_search(pipeline, orders, capacity, 300)
    assert all(peak_bytes(pipeline, r, o) <= capacity[r] for r, o in enumerate(found))
    tight = local_search(pipeline, orders, [2 * KEPT, KEPT, KEPT], 300)
    assert [peak_bytes(pipeline, r, o) for r, o in enumerate(tight)] == [2 * KEPT, KEPT, KEPT]


def test_local_search_lets_no_message_pass_another() -> None:
    """Even where it would pay: the second rank begins with the micro-batch that comes last."""
    text = "0F0 0F1 0I0 0W0 0I1 0W1; 1F1 1F0 1I0 1W0 1I1 1W1"
    pipeline = make_pipeline(place("plain", 2), unit_costs(2), 2)
    orders = encode(parse_schedule(text))
    found = local_search(pipeline, orders, [9 * KEPT] * 2, 300)
    for before, after in zip(orders, found, strict=True):
        for kind in (0, 2):
            assert [w for w in after if w[0] == kind] == [w for w in before if w[0] == kind]


def test_local_search_stops_at_its_target() -> None:
    pipeline, orders = pipeline_of("gpipe", 3, 6)
    assert local_search(pipeline, orders, [9 * KEPT] * 3, 500, target_s=1e9) == orders


def test_a_locked_order_takes_for_ever() -> None:
    pipeline = make_pipeline(place("plain", 2), unit_costs(2), 2)
    good = encode(make_schedule("1f1b", 2, 2))
    assert makespan_s(pipeline, [good[0], [(0, 3), *good[1]]]) < float("inf")
    bad = encode(make_schedule("1f1b", 2, 2))
    bad[0] = [bad[0][0], bad[0][2], bad[0][1], bad[0][3]]
    bad[1] = [bad[1][0], bad[1][2], bad[1][1], bad[1][3]]
    assert makespan_s(pipeline, bad) == float("inf")
