"""Pieces on stages: each is on one, and what stages share is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from merakc.costs.stages import stage_costs
from merakc.costs.state import MIXED
from merakc.ir.state import StateShards
from merakc.ir.strategy import Strategy
from merakc.machines.cluster import NOMINAL_CPU
from merakc.planner.job import Framework, make_job
from tests.planner.test_estimate import HARDWARE, PIECES, SHAPE


@pytest.mark.parametrize("stagewise", [False, True])
@pytest.mark.parametrize(
    ("pp", "chunks", "schedule"), [(1, 1, "1f1b"), (4, 1, "1f1b"), (2, 2, "zb-v")]
)
def test_every_piece_is_on_one_stage(pp: int, chunks: int, schedule: str, stagewise: bool) -> None:
    strategy = Strategy(pp=pp, chunks=chunks, micro_batches=8, schedule=schedule)
    job = make_job(PIECES, strategy, HARDWARE, Framework(stagewise=stagewise))
    assert [k for part in job.parts for k in part] == [*range(len(PIECES))]
    assert sorted(k for held in job.rank_pieces for k in held) == [*range(len(PIECES))]
    whole = make_job(PIECES, Strategy(), HARDWARE).stage_parameters
    # The table of words is at both ends, which are on one rank alone where stages go in a V.
    assert job.tied_parameters == (SHAPE.vocab * SHAPE.hidden_size if pp > 1 else 0)
    assert sum(job.stage_parameters) == sum(whole) + job.tied_parameters
    more = job.tied_parameters if chunks == 1 else 0
    assert sum(job.rank_parameters) == sum(whole) + more
    (held, *_) = job.state_bytes(StateShards(1, 1, 1))
    assert held == job.rank_parameters[0] * (
        MIXED.parameter_bytes + MIXED.gradient_bytes + MIXED.optimizer_bytes
    )


def test_stages_that_are_alike_are_one_value_and_cost_what_each_does() -> None:
    job = make_job(PIECES, Strategy(pp=4, micro_batches=8), HARDWARE, Framework(stagewise=True))
    job = replace(job, parts=[[0, 1, 2], [3], [4], [*range(5, len(PIECES))]])
    shards = StateShards(1, 1, 1)
    for by_block in (False, True):
        found = job.stages(shards, by_block=by_block)
        pairs = zip(found, job.parts, job.rank_of, strict=True)
        for cost, part, rank in pairs:
            (alone,) = stage_costs(
                job.pieces, job.costs[rank], [part], job.places[rank],
                stagewise=not by_block, gradients=True,
            )  # fmt: skip
            assert cost == replace(alone, static_bytes=cost.static_bytes)
        assert found[1] is found[2]


@pytest.mark.parametrize(("schedule", "ends"), [("1f1b", [1, 2, 2, 1]), ("zb-v", [1, 1, 1, 1])])
def test_messages_cost_the_cores_that_carry_them(schedule: str, ends: list[int]) -> None:
    """Stages in a V have neighbours on their own rank."""
    strategy = Strategy(pp=2, chunks=2, micro_batches=8, schedule=schedule)
    framework = Framework(stagewise=True)
    shards, by_cores = StateShards(1, 1, 1), NOMINAL_CPU.described(2)
    slow = replace(NOMINAL_CPU, link_latency_s=1.0).described(2)
    pairs = [make_job(PIECES, strategy, own, framework).stages(shards) for own in (by_cores, slow)]
    more_s = [1.0 - NOMINAL_CPU.link_latency_s] * 2
    for free, cost, count in zip(*pairs, ends, strict=True):
        found = cost.forward_s - free.forward_s, cost.backward_s - free.backward_s
        assert found == pytest.approx([count * s for s in more_s])


def test_the_state_of_experts_is_shared_by_dp_ranks_alone() -> None:
    first = {id(p): next(iter(p.parameters)) for p in PIECES if p.path}
    of_experts = {
        id(p): replace(p, experts=frozenset({first[id(p)]} if p.path else ())) for p in PIECES
    }
    pieces = [of_experts[id(p)] for p in PIECES]
    strategy = Strategy(dp=2, cp=4, expert_parallel=True, micro_batches=8)
    job = make_job(pieces, strategy, HARDWARE, Framework(stagewise=True))
    (every,), (experts,) = job.rank_parameters, job.rank_experts
    assert experts == sum(p.parameters[first[id(p)]] for p in PIECES if p.path) > 0
    shards = StateShards(1, 1, 8)
    assert job.owned(shards) == [(every - experts) // 8 + experts // 2]
    held = 4 * every + MIXED.optimizer_bytes * job.owned(shards)[0]
    assert job.state_bytes(shards) == [held]
    assert [cost.static_bytes for cost in job.stages(shards)] == [held]
    plain = make_job(PIECES, strategy, HARDWARE, Framework(stagewise=True))
    assert plain.state_bytes(shards)[0] < held
