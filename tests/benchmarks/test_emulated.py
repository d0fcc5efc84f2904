"""The emulated pipeline; its times are no matter of the tests."""

from __future__ import annotations

import pytest

from benchmarks import emulated
from benchmarks.emulated import WAIT, Case, cases, measure, unit_costs, wait_chunk, waits
from merakc.ir.graph import Graph
from merakc.schedules.registry import NAMES, make_schedule
from merakc.simulate import verify_programs


def waited_s(graph: Graph | None) -> float:
    assert graph is not None
    return sum(n.args[1] for n in graph.nodes if n.op == WAIT)


@pytest.mark.parametrize("stage", range(3))
def test_every_piece_waits_as_long_as_its_cost_says(stage: int) -> None:
    chunk, cost = wait_chunk(stage, 3, waits(3, 3)), unit_costs(3, 3)[stage]
    assert waited_s(chunk.forward) == waited_s(chunk.checkpoint) == cost.forward_s
    assert waited_s(chunk.recompute) == cost.recompute_s
    assert waited_s(chunk.backward) == pytest.approx(cost.backward_s)
    assert waited_s(chunk.input_grad) == cost.input_grad_s
    assert waited_s(chunk.weight_grad) == pytest.approx(cost.weight_grad_s)


def test_every_known_schedule_is_a_case() -> None:
    found = cases(4, 8)
    assert {case.name for case in found} > set(NAMES)
    for case in found:
        verify_programs(case.programs)


def test_a_case_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulated, "UNIT_S", 0.002)
    schedule = make_schedule("zb-v", 2, 4, recompute="full")
    case = Case("zb-v", 2, schedule, unit_costs(schedule.stages, 2))
    result = measure(case, 4, runs=1)
    assert result.measured_s > 12 * 0.002  # the computes of a rank alone
    assert result.simulated_s >= 4 * 4 * 0.002
