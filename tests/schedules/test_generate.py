"""`auto`: within the memory, no worse than what is known, and near the figures to beat."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.schedules import split_stages
from merakc.errors import ConfigError
from merakc.ir.costs import CostTable, StageCost
from merakc.ir.program import ActionKind, Mesh, Transfer
from merakc.passes.programs.schedule import build_programs
from merakc.schedules.check import check_schedule
from merakc.schedules.generate import Generated, fits, generate, known_schedules
from merakc.schedules.placement import place
from merakc.schedules.planned import forwards_first
from merakc.schedules.registry import NAMES, make_schedule
from merakc.schedules.timing import make_pipeline, time_schedule
from merakc.simulation.simulate import simulate
from tests.schedules.test_list_scheduler import stage_costs
from tests.schedules.unit_costs import KEPT, UNIT, peak, unit_costs, unit_time


def auto(ranks: int, m: int, cap: float, effort: int = 300_000) -> Generated:
    pipelines = [
        make_pipeline(place("v", ranks, 2), unit_costs(ranks, 2), m),
        make_pipeline(place("plain", ranks), unit_costs(ranks), m),
    ]
    return generate(pipelines, [round(cap * KEPT)] * ranks, effort=effort)


@pytest.mark.parametrize(
    ("cap", "seconds"), [(4.0, 25.5), (3.0, 26.5), (2.0, 29.0), (1.5, 32.0), (1.2, 32.5)]
)
def test_four_ranks(cap: float, seconds: float) -> None:
    found = auto(4, 8, cap)
    timing = time_schedule(found.schedule, found.pipeline.costs)
    assert timing.makespan_s == found.makespan_s <= 1.02 * seconds
    assert peak(timing) <= cap
    assert found.bound_s <= found.makespan_s


@pytest.mark.parametrize(("cap", "seconds"), [(8.0, 99.5), (4.0, 109.5), (2.67, 125.0)])
def test_eight_ranks(cap: float, seconds: float) -> None:
    found = auto(8, 32, cap)
    assert found.makespan_s <= seconds
    assert peak(time_schedule(found.schedule, found.pipeline.costs)) <= cap


@pytest.mark.parametrize("name", NAMES)
def test_no_worse_than_a_known_schedule_in_its_own_memory(name: str) -> None:
    for recompute in ((), "full") if name != "merak" else ("full",):
        schedule = make_schedule(name, 3, 6, recompute=recompute)  # type: ignore[arg-type]
        timing = unit_time(schedule)
        costs = unit_costs(3, schedule.stages // 3)
        pipeline = make_pipeline(schedule.rank_of, costs, 6)
        found = generate([pipeline], timing.peak_bytes, effort=1)
        assert found.makespan_s <= timing.makespan_s


def test_known_schedules_are_offered_where_they_fit() -> None:
    pipeline = make_pipeline(place("plain", 4), unit_costs(4), 8)

    def names(cap: float, split: bool = True) -> set[str]:
        return {f.method for f in known_schedules(pipeline, [round(cap * KEPT)] * 4, split)}

    assert names(99.0) == {"gpipe", "1f1b", "merak", "zb-h1", "zb-h2"}
    assert names(99.0, split=False) == {"gpipe", "1f1b", "merak"}
    assert names(1.2) == {"1f1b", "merak"}
    assert names(1.0) == set()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_costs(data: st.DataObject) -> None:
    """Complete, within each rank's own capacity, and the same when made again."""
    ranks, m = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    chunks = data.draw(st.sampled_from([1, 2]))
    rank_of = place("v" if chunks == 2 else "plain", ranks, chunks)
    costs = [data.draw(stage_costs()) for _ in rank_of]
    pipeline = make_pipeline(rank_of, costs, m, data.draw(st.integers(0, 3)))
    capacity = [data.draw(st.integers(60, 400)) for _ in range(ranks)]
    split = data.draw(st.booleans())
    try:
        found = generate([pipeline], capacity, split=split, effort=3000)
    except ConfigError:
        return
    check_schedule(found.schedule)
    timing = time_schedule(found.schedule, costs, pipeline.link_s)
    assert timing.makespan_s == found.makespan_s
    assert found.bound_s <= found.makespan_s + 1e-9
    assert all(a <= b for a, b in zip(timing.peak_bytes, capacity, strict=True))
    kinds = {a.kind for order in found.schedule.orders for a in order}
    assert split or kinds.isdisjoint({ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD})
    assert generate([pipeline], capacity, split=split, effort=3000) == found


def test_recomputation_only_where_memory_is_short() -> None:
    """One rank has room for one micro-batch alone; nobody else recomputes."""
    pipeline = make_pipeline(place("plain", 3), unit_costs(3), 6)
    found = generate([pipeline], [round(1.3 * KEPT), 9 * KEPT, 9 * KEPT], effort=100_000)
    ranks = {
        rank
        for rank, order in enumerate(found.schedule.orders)
        for action in order
        if action.kind is ActionKind.RECOMPUTE
    }
    assert ranks == {0}


def test_costs_that_cannot_be_split() -> None:
    costs = [replace(UNIT, input_grad_s=0.0, weight_grad_s=0.0)] * 3
    found = generate([make_pipeline(place("plain", 3), costs, 6)], [3 * KEPT] * 3, effort=20_000)
    assert found.makespan_s == found.bound_s == 3 * (6 + 2)
    assert {a.kind for order in found.schedule.orders for a in order} == {
        ActionKind.FORWARD,
        ActionKind.BACKWARD,
    }


def test_unequal_stages_beat_fixed_patterns() -> None:
    costs = [replace(UNIT, forward_s=f, input_grad_s=f, weight_grad_s=f) for f in (1.0, 1.4, 0.8)]
    costs = [replace(c, backward_s=c.input_grad_s + c.weight_grad_s) for c in costs]
    pipeline = make_pipeline(place("v", 3, 2), split_stages(costs, 2), 12, 0.1)
    capacity = [2 * KEPT] * 3
    best = min(f.makespan_s for f in known_schedules(pipeline, capacity))
    assert generate([pipeline], capacity, effort=100_000).makespan_s < 0.98 * best


def test_the_pipeline_that_is_better_is_chosen() -> None:
    assert auto(4, 8, 4.0).pipeline.stages == 8
    slow = make_pipeline(place("v", 4, 2), unit_costs(4, 2), 8, latency_s=5.0)
    plain = make_pipeline(place("plain", 4), unit_costs(4), 8)
    assert generate([slow, plain], [4 * KEPT] * 4, effort=30_000).pipeline is plain


def test_too_little_memory() -> None:
    pipeline = make_pipeline((0, 1), [UNIT, replace(UNIT, static_bytes=70)], 4)
    with pytest.raises(ConfigError, match=r"rank 1 may hold 1020 bytes, .* takes 1070,.* 70"):
        generate([pipeline], [1020, 1020])


def test_fits_asks_every_rank() -> None:
    pipeline = make_pipeline((0, 1), [UNIT, StageCost(1, 1, saved_bytes=9)], 2)
    orders = [list(order) for order in ([(0, 0), (1, 0), (0, 1), (1, 1)],) * 2]
    orders[1] = [(kind, unit + 2) for kind, unit in orders[0]]
    assert fits(pipeline, orders, [KEPT, 9])
    assert not fits(pipeline, orders, [KEPT, 8])
    assert not fits(pipeline, orders, [KEPT - 1, 9])


@pytest.mark.parametrize(("cap", "seconds"), [(8.0, 30.5), (4.5, 34.5), (2.0, 37.5)])
def test_backwards_that_wait_for_all_forwards(cap: float, seconds: float) -> None:
    pipeline = make_pipeline(range(4), unit_costs(4), 8, head_s=0.5)
    found = generate([pipeline], [round(cap * KEPT)] * 4, effort=100_000)
    assert found.bound_s <= found.makespan_s <= seconds
    assert forwards_first(found.schedule) == found.schedule
    assert peak(time_schedule(found.schedule, pipeline.costs)) <= cap
    # The simulator, which runs the head as an action, comes to the same.
    transfers = [Transfer(f"h{s}", s, s + 1, 0, True) for s in range(3)]
    programs = build_programs(Mesh(pp=4), found.schedule, transfers, head=3)
    costs = (*pipeline.costs[:3], replace(pipeline.costs[3], head_s=0.5))
    simulated = simulate(programs, CostTable(costs, 0.0, float("inf")), head=3)
    assert simulated.step_s == pytest.approx(found.makespan_s)


def test_all_micro_batches_must_have_room_where_backwards_wait_for_all_forwards() -> None:
    again = replace(UNIT, checkpoint_bytes=KEPT // 2)
    assert generate([make_pipeline((0,), (again,), 8)], [2 * KEPT])
    with pytest.raises(ConfigError, match="nothing fits"):
        generate([make_pipeline((0,), (again,), 8, head_s=0.0)], [2 * KEPT])
