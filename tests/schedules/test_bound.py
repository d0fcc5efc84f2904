"""Bounds of the makespan, worked out by hand, and against schedules."""

from __future__ import annotations

from dataclasses import replace

import pytest

from merakc.ir.costs import StageCost
from merakc.schedules.bound import can_split, least_recomputation, lower_bound_s
from merakc.schedules.placement import place
from merakc.schedules.registry import NAMES, make_schedule
from merakc.schedules.timing import Pipeline, make_pipeline, time_schedule
from tests.schedules.unit_costs import KEPT, UNIT, unit_costs


def pipeline_of(placement: str, ranks: int, m: int, latency_s: float = 0.0) -> Pipeline:
    chunks = 1 if placement == "plain" else 2
    rank_of = place(placement, ranks, chunks)  # type: ignore[arg-type]
    return make_pipeline(rank_of, unit_costs(ranks, chunks), m, latency_s)


def test_with_memory_enough_the_last_rank_to_start_bounds() -> None:
    ample = [100 * KEPT] * 4
    assert lower_bound_s(pipeline_of("plain", 4, 8), ample) == 3 + 24
    assert lower_bound_s(pipeline_of("v", 4, 8), ample) == 1.5 + 24
    assert lower_bound_s(pipeline_of("v", 4, 8, latency_s=0.25), ample) == 1.5 + 0.75 + 24
    # One micro-batch: down, back up, and the first stage's weight gradient.
    assert lower_bound_s(pipeline_of("plain", 4, 1, latency_s=0.25), ample) == 4 + 4 + 1 + 1.5


def test_whole_backwards_also_go_back() -> None:
    costs = [replace(UNIT, input_grad_s=0.0, weight_grad_s=0.0)] * 4
    assert not can_split(costs)
    pipeline = make_pipeline(place("plain", 4), costs, 8)
    assert lower_bound_s(pipeline, [100 * KEPT] * 4) == 33


def test_byte_seconds_ask_for_recomputation() -> None:
    # The first of two stages works for 3 s a micro-batch and keeps 1000 bytes for 5 s; recomputed,
    # 50 bytes for the 4 s to the end of its input gradient, 950 for the 2 s of recomputation and
    # input gradient, and 1000 for the weight gradient's 1 s.
    pipeline = make_pipeline((0, 1), [UNIT, UNIT], 10)
    whole, again = 5000.0, 50 * 4 + 950 * 2 + 1000
    assert least_recomputation(pipeline, [1700, 1700]).shares == (0.0, 0.0)
    found = least_recomputation(pipeline, [1500, 1500])
    share = (whole - 1500 * 3) / (whole - again + 1500 * 1)
    assert found.shares == (share, 0.0)
    assert found.period_s == (pytest.approx(3 + share), 3)
    assert whole - share * (whole - again) == pytest.approx(1500 * found.period_s[0])
    starved = least_recomputation(pipeline, [100, 9000])
    assert (starved.shares, starved.period_s) == ((1.0, 0.0), (again / 100, 3))
    assert lower_bound_s(pipeline, [100, 9000]) == 10 * again / 100


def test_messages_hold_memory_both_ways() -> None:
    # As above, with 5 s and two messages of 0.5 s between forward and the end of the backward.
    pipeline = make_pipeline((0, 1), [UNIT, UNIT], 10, 0.5)
    assert least_recomputation(pipeline, [2000, 2000]).shares == (0.0, 0.0)
    share = (6000 - 1900 * 3) / (6000 - (50 * 5 + 950 * 2 + 1000) + 1900)
    assert least_recomputation(pipeline, [1900, 1900]).shares == (pytest.approx(share), 0.0)


def test_the_stage_that_spares_most_is_recomputed_first() -> None:
    pipeline = pipeline_of("v", 4, 8)
    shares = least_recomputation(pipeline, [KEPT * 6 // 5] * 4).shares
    assert shares[0] > 0.0
    assert shares[7] == 0.0  # forward and backward follow each other at once
    assert shares[3] > shares[4]


def test_spare_is_what_memory_holds_beyond_what_it_must() -> None:
    pipeline = make_pipeline((0,), [UNIT], 10)
    assert least_recomputation(pipeline, [1000]).spare == 0.0
    assert least_recomputation(pipeline, [3500]).spare == 2.5


@pytest.mark.parametrize("name", NAMES)
def test_no_known_schedule_beats_the_bound_of_its_own_memory(name: str) -> None:
    for ranks in (1, 2, 3, 5):
        for m in (1, 2, 5, 12):
            for recompute in ([], [0], range(ranks)):
                schedule = make_schedule(name, ranks, m, recompute=recompute)
                costs = unit_costs(ranks, schedule.stages // ranks)
                for latency_s in (0.0, 0.3):
                    timing = time_schedule(schedule, costs, latency_s)
                    pipeline = make_pipeline(schedule.rank_of, costs, m, latency_s)
                    bound_s = lower_bound_s(pipeline, timing.peak_bytes)
                    assert bound_s <= timing.makespan_s + 1e-9


def test_static_bytes_are_not_to_be_had() -> None:
    plain = make_pipeline((0,), [UNIT], 10)
    heavy = make_pipeline((0,), [StageCost(**{**_fields(UNIT), "static_bytes": 500})], 10)
    assert lower_bound_s(heavy, [1300]) == lower_bound_s(plain, [800])


def _fields(cost: StageCost) -> dict[str, object]:
    return {name: getattr(cost, name) for name in StageCost.__slots__}
