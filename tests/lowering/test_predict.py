"""What plans should cost."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from benchmarks.models import MODELS
from merakc.frontend.record import Recording
from merakc.ir.program import ActionKind, Mesh
from merakc.ir.state import StateShards
from merakc.ir.strategy import Strategy
from merakc.lowering.lowered import Lowered, make_plan
from merakc.lowering.predict import cost_table, planned_costs, predict
from merakc.machines.cluster import NOMINAL_CPU, Sharing
from tests.recorded import one_of_several

SLOW = replace(NOMINAL_CPU, op_overhead_s=0.0, link_latency_s=0.0, link_bytes_per_s=1e6)
MICRO_BATCHES = 4


@cache
def recording() -> Recording:
    case = MODELS["gpt2"]
    return one_of_several(case.model(), case.batch(2))


def lowered(mesh: Mesh, *counts: int) -> Lowered:
    found = make_plan(recording(), Strategy().on(mesh, micro_batches=MICRO_BATCHES), NOMINAL_CPU)
    plan = found.plan
    shards = (StateShards(*counts),) * mesh.pp if counts else ()
    return replace(found, plan=replace(plan, state_shards=shards))


def gradient_bytes(found: Lowered) -> int:
    return sum(i.spec.size_bytes for i in found.stages.local[0].inputs if i.requires_grad)


def test_data_parallel_ranks_reduce_their_gradients() -> None:
    one, four = lowered(Mesh()), lowered(Mesh(dp=4))
    alone, _ = predict(one, SLOW)
    together, simulation = predict(four, SLOW)
    # One bucket: next to nothing is left to hide its reduction behind.
    wire_s = 1.5 * gradient_bytes(one) / 1e6
    assert together.step_s - alone.step_s == pytest.approx(wire_s, rel=1e-4)
    assert alone.exposed_s == (0.0,)
    assert together.exposed_s == pytest.approx((together.step_s - alone.step_s,))
    assert simulation.communication_s == pytest.approx((wire_s,) * 4)
    assert [e.kind for e in simulation.collectives] == [ActionKind.REDUCE] * 4


def test_one_dp_rank_stands_for_all() -> None:
    found = lowered(Mesh(dp=2, tp=2, pp=2), 2, 2, 2)
    whole, all_ranks = predict(found, SLOW)
    first, simulation = predict(found, SLOW, dp_rank=0)
    assert first == replace(whole, bubble_share=first.bubble_share)
    assert first.bubble_share == pytest.approx(whole.bubble_share)
    assert (len(simulation.busy_s), len(all_ranks.busy_s)) == (2, 8)


def test_tied_parameters_are_added_up_over_the_pipeline() -> None:
    found = lowered(Mesh(pp=2))
    tied = [n for n, stages in found.plan.parameters.items() if len(stages) > 1]
    assert tied
    size_bytes = sum(i.spec.size_bytes for i in found.stages.local[0].inputs if i.target in tied)
    _, simulation = predict(found, SLOW)
    for rank in (0, 1):
        (reduce,) = (e for e in simulation.events if e.rank == rank and e.kind is ActionKind.REDUCE)
        assert reduce.end_s - reduce.start_s == pytest.approx(size_bytes / 1e6)


@pytest.mark.parametrize("counts", [(1, 1, 4), (1, 4, 4), (4, 4, 4)])
def test_sharding_communicates_as_its_formula_says(counts: tuple[int, int, int]) -> None:
    found = lowered(Mesh(dp=4), *counts)
    _, simulation = predict(found, SLOW, dp_rank=0)
    share_s = 0.75 * gradient_bytes(found) / 1e6
    # One bucket stays gathered from its first use on.
    expected = {(1, 1, 4): 2, (1, 4, 4): 1 + MICRO_BATCHES, (4, 4, 4): 1 + MICRO_BATCHES}
    assert simulation.communication_s == pytest.approx((expected[counts] * share_s,))


@pytest.mark.parametrize("cores", [0, 2, 3, 4])
def test_messages_cost_the_cores_that_carry_them_at_both_ends(cores: int) -> None:
    """Of four cores for two ranks two have nothing else to do; of GPUs it is no core."""
    found = lowered(Mesh(pp=2))
    cluster = replace(SLOW, link_latency_s=1.0)
    sharing = Sharing((1.0,) * cores, 4) if cores else None
    for own, share in (
        (replace(cluster, sharing=sharing), 1.0 - max(cores / 2 - 1.0, 0.0)),
        (replace(cluster, gather_share=1.0), 0.0),
    ):
        free = cost_table(found, replace(own, link_latency_s=0.0), planned_costs(found, own))
        table = cost_table(found, own, planned_costs(found, own))
        values = len(found.stages.transfers)
        gradients = sum(t.grad for t in found.stages.transfers)
        assert 0 < gradients <= values
        for stage, before in zip(table.stages, free.stages, strict=True):
            assert stage.forward_s - before.forward_s == pytest.approx(values * share)
            assert stage.backward_s - before.backward_s == pytest.approx(gradients * share)
            assert stage.weight_grad_s == before.weight_grad_s


def test_messages_as_measured_cost_what_was_measured() -> None:
    found, costs = lowered(Mesh(pp=2)), planned_costs(lowered(Mesh(pp=2)), SLOW)
    table = cost_table(found, SLOW, costs, (0.5, 1e9))
    assert (table.p2p_latency_s, table.p2p_bytes_per_s) == (0.5, 1e9)
    assert table.stages[0].forward_s - costs[0].forward_s == pytest.approx(
        0.5 * len(found.stages.transfers)
    )
