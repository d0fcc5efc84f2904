from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from merakc.ir.costs import CostTable, StageCost
from merakc.ir.program import Mesh, Transfer
from merakc.passes.programs.schedule import build_programs
from merakc.report.idle import idle_split
from merakc.schedules.registry import NAMES, make_schedule
from merakc.simulation.simulate import Simulation, simulate


def simulated(name: str, p: int, m: int, latency_s: float = 0.0) -> Simulation:
    schedule = make_schedule(name, p, m)
    chain = [Transfer(f"h{s}", s, s + 1, 8, True) for s in range(schedule.stages - 1)]
    programs = build_programs(Mesh(pp=p), schedule, chain)
    cost = StageCost(1.0, 2.0, 1.0, 1.0, 1.0)
    return simulate(programs, CostTable((cost,) * schedule.stages, latency_s, float("inf")))


def test_the_idle_time_of_1f1b_on_two_ranks() -> None:
    first, last = idle_split(simulated("1f1b", 2, 3).events)
    assert (first.warm_up_s, first.cool_down_s) == (0.0, 0.0)
    # 0F0 0F1 | wait for 1B0 | 0B0 0F2 | ... the last gradient comes when 0F2 has long ended
    assert first.waiting_s == (("recv 0B0 h0 <- 1", 2.0), ("recv 0B2 h0 <- 1", 1.0))
    assert (last.warm_up_s, last.cool_down_s, last.waiting_s) == (1.0, 2.0, ())


@given(st.sampled_from(NAMES), st.integers(1, 4), st.integers(1, 6), st.sampled_from([0.0, 0.25]))
def test_busy_and_idle_make_up_the_step(name: str, p: int, m: int, latency_s: float) -> None:
    found = simulated(name, p, m, latency_s)
    for idle, busy_s in zip(idle_split(found.events), found.busy_s, strict=True):
        assert idle.total_s + busy_s == pytest.approx(found.step_s)


def test_nothing() -> None:
    assert idle_split(()) == ()
