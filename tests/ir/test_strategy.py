"""Strategies: what requests fix, searches decide and plans carry."""

from __future__ import annotations

from dataclasses import fields

from merakc.ir.plan import Plan
from merakc.ir.program import Degrees, Mesh
from merakc.ir.state import UNSHARDED, StateShards
from merakc.ir.strategy import AXES, DECISIONS, Strategy
from merakc.planner.request import FOLLOWING, Request
from tests.ir.test_plan import PLAN


def test_an_axis_stands_in_one_place() -> None:
    """The mesh, strategies and plans have those of `Degrees`; a request can ask for each."""
    assert set(AXES) == {field.name for field in fields(Degrees)}
    for kind in (Mesh, Strategy, Plan, Request):
        assert set(AXES) <= {field.name for field in fields(kind)}


def test_each_decision_can_be_asked_for_by_its_name() -> None:
    assert set(DECISIONS) <= {field.name for field in fields(Request)}
    asked = Request(8, 4, dp=2, micro_batches=4, sequence_parallel=False, state_shards="zero-1")
    assert asked.fixed == {
        "dp": 2, "micro_batches": 4, "sequence_parallel": False, "state_shards": "zero-1",
    }  # fmt: skip
    assert Request(8, 4, recompute="none").fixed == {"recompute": "none"}
    assert Request(8, 4, offload="optimizer").fixed == {"offload": "optimizer"}
    decided = asked.decided(Strategy(2, 2, 2, batch_size=8, micro_batches=4, schedule="zb-h1"))
    left = {*FOLLOWING, "chunks", "order", "recompute", "offload", "precision", "expert_load"}
    assert set(DECISIONS) - set(decided.fixed) == left
    assert (decided.tp, decided.batch_size, decided.schedule) == (2, 8, "zb-h1")
    assert decided.state_shards == "zero-1"


def test_what_a_strategy_says() -> None:
    sharded = Strategy(4, 2, 2, batch_size=12, micro_batches=3, chunks=2, state_shards=())
    assert sharded.mesh == Mesh(4, 2, 2)
    assert (sharded.samples, sharded.total_batch_size, sharded.stage_count) == (4, 48, 4)
    assert sharded.shards(1) == UNSHARDED
    more = sharded.on(Mesh(2, 1, 2, "dp"), state_shards=(StateShards(1, 1, 2),) * 4)
    assert (more.mesh, more.shards(3).optimizer) == (Mesh(2, 1, 2, "dp"), 2)
    assert str(sharded) == "dp=4 tp=2 pp=2, 3 micro-batches, 1f1b of 2 stages a rank"
    assert str(Strategy(dp=2)) == "dp=2 tp=1 pp=1, 1 micro-batch"


def test_a_plan_is_a_strategy() -> None:
    assert type(PLAN.strategy) is Strategy
    assert {name: getattr(PLAN, name) for name in DECISIONS} == {
        name: getattr(PLAN.strategy, name) for name in DECISIONS
    }
