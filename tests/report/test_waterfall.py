"""The parts of a peak add up to the simulator's, byte for byte."""

from __future__ import annotations

import pytest

from merakc.costs.work.sharded import graph_state_bytes
from merakc.ir.program import Mesh
from merakc.lowering.lowered import Lowered
from merakc.lowering.predict import predict
from tests.report.made import ALL_AXES, SLOW, coupled, lowered, report

CASES = {
    "all axes": lambda: lowered(),
    "one rank": lambda: lowered(Mesh()),
    "recomputed": lambda: lowered(Mesh(pp=4), recompute="stage"),
    "halves of backwards": lambda: lowered(Mesh(pp=4), "zb-h1"),
    "two stages a rank": lambda: lowered(Mesh(pp=2), "zb-v"),
    "sharded": lambda: lowered(Mesh(4, 1, 2), shards=(4, 4, 4)),
    "coupled": lambda: coupled(),
    "mixed": lambda: lowered(ALL_AXES, shards=(1, 2, 2), precision="bf16-mixed"),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Lowered:
    found: Lowered = CASES[request.param]()
    return found


def test_parts_add_up_to_the_simulated_peak(case: Lowered) -> None:
    _, simulation = predict(case, SLOW, dp_rank=0)
    found = report(case)
    assert tuple(m.peak_bytes for m in found.memory) == simulation.peak_bytes
    assert all(size >= 0 for m in found.memory for _, size in m.parts)


def test_state_is_that_of_the_stages(case: Lowered) -> None:
    plan = case.plan
    for memory in report(case).memory:
        own = [s for s, rank in enumerate(plan.rank_of) if rank == memory.rank]
        graphs = [case.stages.local[s] for s in own]
        state = [
            graph_state_bytes(g, plan.shards(s), plan.precision, plan.other_shards(s))
            for g, s in zip(graphs, own, strict=True)
        ]
        held = memory.parameters_bytes + memory.optimizer_bytes
        assert held == sum(s.kept_bytes for s in state)
        assert memory.gathered_bytes == sum(s.gathered_bytes for s in state)
        assert memory.gradients_bytes >= sum(s.summed_bytes + s.filling_bytes for s in state)


def test_the_first_rank_of_a_pipeline_holds_most_micro_batches() -> None:
    found = report(lowered(Mesh(pp=4)))
    assert [m.in_flight for m in found.memory] == [4, 3, 2, 1]
    # They are fullest in a backward.
    assert [m.action[:2] for m in found.memory] == ["0B", "1B", "2B", "3B"]


def test_a_recomputing_rank_holds_what_enters_alone() -> None:
    again = lowered(Mesh(pp=4), recompute="stage")
    first, second, *_ = report(again).memory
    kept = report(lowered(Mesh(pp=4))).memory
    # Of one all is made again; the first rank holds the batch alone of the others.
    assert (first.in_flight, first.activations_bytes) == (4, kept[0].activations_bytes // 4)
    received_bytes = next(t.size_bytes for t in again.stages.transfers if t.target_stage == 1)
    one_bytes = kept[1].activations_bytes // 3
    assert (second.in_flight, second.activations_bytes) == (3, one_bytes + 2 * received_bytes)
