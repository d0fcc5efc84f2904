"""Times and bytes of an order, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.schedules import late_recomputation, split_stages
from merakc.errors import ProgramError
from merakc.ir.costs import CostTable, StageCost
from merakc.ir.program import Mesh, Transfer
from merakc.passes.programs.schedule import build_programs
from merakc.schedules.generate import generate
from merakc.schedules.registry import NAMES, make_schedule
from merakc.schedules.text import parse_schedule
from merakc.schedules.timing import make_pipeline, time_schedule
from merakc.simulation.simulate import simulate
from tests.schedules.unit_costs import UNIT, action_times, unit_costs, unit_time


def test_starts_ends_and_idle_time() -> None:
    costs = [StageCost(1.0, 2.0), StageCost(3.0, 4.0, input_grad_s=2.5, weight_grad_s=1.5)]
    timing = time_schedule(parse_schedule("0F0 0F1 0B0 0B1; 1F0 1I0 1W0 1F1 1B1"), costs, 0.5)
    assert timing.start_s == ((0.0, 1.0, 7.5, 16.0), (1.5, 4.5, 7.0, 8.5, 11.5))
    assert timing.end_s == ((1.0, 2.0, 9.5, 18.0), (4.5, 7.0, 8.5, 11.5, 15.5))
    assert (timing.makespan_s, timing.span_s) == (18.0, 18.0)
    assert timing.busy_s == (6.0, 14.0)


def test_a_rank_s_own_stages_have_no_link() -> None:
    timing = unit_time(parse_schedule("0F0 1F0 1B0 0B0"), unit_costs(2))
    assert timing.makespan_s == 6.0
    pipeline = make_pipeline((0, 1, 1, 0), unit_costs(4), 1, (3.0, 2.0, 1.0))
    assert pipeline.link_s == (3.0, 0.0, 1.0)


def test_links_of_their_own() -> None:
    text = "0F0 0B0; 1F0 1B0; 2F0 2B0"
    timing = time_schedule(parse_schedule(text), [StageCost(1.0, 1.0)] * 3, (10.0, 100.0))
    assert timing.start_s == ((0.0, 225.0), (11.0, 214.0), (112.0, 113.0))


def test_recomputation_starts_before_the_gradient_unless_it_is_late() -> None:
    text = "0F0 0R0 0B0; 1F0 1B0"
    times = action_times(parse_schedule(text), unit_time(parse_schedule(text)))
    assert [times[a] for a in parse_schedule(text).orders[0]] == [(0, 1), (1, 2), (4, 6)]
    late = late_recomputation(unit_costs(2), [0])
    assert unit_time(parse_schedule(text), late).makespan_s == 7


def test_bytes_of_each_action() -> None:
    cost = StageCost(1, 1, 1, 1, 1, saved_bytes=100, checkpoint_bytes=10, deferred_bytes=60)

    def peak(text: str, **more: int) -> int:
        fields = {f: getattr(cost, f) for f in StageCost.__slots__} | more
        (found,) = time_schedule(parse_schedule(text), [StageCost(**fields)]).peak_bytes
        return found

    assert peak("0F0 0B0 0F1 0B1") == 100
    assert peak("0F0 0F1 0B0 0B1", static_bytes=7) == 207
    assert peak("0F0 0F1 0R0 0B0 0R1 0B1") == 110
    assert peak("0F0 0F1 0R0 0R1 0B0 0B1") == 200
    assert peak("0F0 0I0 0F1 0W0 0B1") == 160
    assert peak("0F0 0I0 0W0 0F1 0B1") == 100
    assert peak("0F0 0B0", forward_peak_bytes=130) == 130
    assert peak("0F0 0R0 0B0", recompute_peak_bytes=130) == 140
    assert peak("0F0 0R0 0B0", forward_peak_bytes=130) == 100
    assert peak("0F0 0R0 0B0", checkpoint_peak_bytes=130) == 130
    assert peak("0F0 0B0", backward_peak_bytes=130) == 230
    assert peak("0F0 0I0 0W0", input_grad_peak_bytes=130) == 230
    assert peak("0F0 0I0 0W0", weight_peak_bytes=130) == 190


@pytest.mark.parametrize("name", NAMES)
def test_no_action_starts_before_what_it_reads(name: str) -> None:
    schedule = make_schedule(name, 4, 6, recompute="full")
    timing = unit_time(schedule)
    times = {str(a): t for a, t in action_times(schedule, timing).items()}
    for label, (start, _) in times.items():
        stage, kind, j = int(label[0]), label[1], label[2:]
        before = {
            "F": [f"{stage - 1}F{j}"],
            "R": [f"{stage}F{j}"],
            "W": [f"{stage}I{j}"],
        }.get(kind, [f"{stage}F{j}", f"{stage}R{j}", f"{stage + 1}B{j}", f"{stage + 1}I{j}"])
        assert all(times[b][1] <= start for b in before if b in times), label
    for starts, ends in zip(timing.start_s, timing.end_s, strict=True):
        assert all(a <= b for a, b in zip(ends, starts[1:], strict=False))


def test_the_simulator_of_programs_agrees() -> None:
    """With messages of no bytes; orders made for the costs of unequal stages among them."""
    for ranks, m in ((2, 3), (4, 6)):
        schedules = [make_schedule(n, ranks, m, recompute="full") for n in NAMES]
        costs = [replace(UNIT, forward_s=1.0 + 0.2 * s, saved_bytes=400 + s) for s in range(ranks)]
        pipeline = make_pipeline(range(ranks), costs, m, 0.25)
        schedules.append(generate([pipeline], [900] * ranks, effort=5000).schedule)
        for schedule in schedules:
            chunks = schedule.stages // ranks
            every = split_stages(costs, chunks)
            timing = time_schedule(schedule, every, 0.25)
            transfers = [Transfer("x", s, s + 1, 0, True) for s in range(schedule.stages - 1)]
            programs = build_programs(Mesh(pp=ranks), schedule, transfers)
            found = simulate(programs, CostTable(every, 0.25, 1.0))
            assert found.step_s == pytest.approx(timing.makespan_s, rel=1e-12), schedule.name
            assert found.peak_bytes == timing.peak_bytes, schedule.name


def test_a_deadlock_is_refused() -> None:
    good = make_schedule("1f1b", 2, 2)
    bad = type(good)("bad", good.rank_of, (good.orders[0], good.orders[1][::-1]))
    with pytest.raises(ProgramError, match="rank 1, 1B1: stands before its forward"):
        unit_time(bad)
