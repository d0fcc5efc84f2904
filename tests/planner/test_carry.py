"""Plans carried to other strategy: every decision stays of its kind."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
import transformers

from merakc.equality.lower import lower_strategy
from merakc.equality.train import comparable
from merakc.frontend.record import Recording
from merakc.ir.plan import Plan
from merakc.ir.precision import Precision
from merakc.ir.program import ActionKind, Mesh
from merakc.ir.state import StateShards
from merakc.ir.strategy import Strategy
from merakc.lowering.lowered import make_plan
from merakc.machines.cluster import NOMINAL_CPU, NOMINAL_GPU
from merakc.planner.carry import carry_plan
from tests.recorded import recorded as record_in_parts

SAMPLES = 16


@cache
def recorded(parts: int) -> Recording:
    """A GPT-2 of four layers, in float64."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=4, n_embd=16, n_head=2, vocab_size=32, n_positions=8, use_cache=False
    )
    model = transformers.GPT2LMHeadModel(config).double().train()
    ids = torch.zeros(SAMPLES, 8, dtype=torch.long)
    with comparable(lift=True):
        batch = {"input_ids": ids, "labels": ids}
        return record_in_parts(model, batch, parts, dp=2)


@cache
def _made(schedule: str, chunks: int = 1, recompute: str = "none") -> Plan:
    pp = 2
    return make_plan(
        recorded(8),
        Strategy().on(
            Mesh(pp=pp),
            micro_batches=8,
            batch_size=SAMPLES,
            schedule=schedule,
            chunks=chunks,
            recompute=recompute,
        ),
        NOMINAL_GPU,
    ).plan


def _large(plan: Plan, dp: int = 1, tp: int = 1, pp: int = 2, **more: object) -> Plan:
    """The same decisions on more ranks than the model has room for: nothing is applied here."""
    chunks = len(plan.rank_of) // plan.pp
    placement = tuple(r for k in range(chunks) for r in range(pp)) if chunks > 1 else ()
    return replace(plan, dp=dp, tp=tp, pp=pp, placement=placement, **more)


@pytest.mark.parametrize(
    ("schedule", "chunks", "stages", "ranks"),
    [
        ("1f1b", 1, 2, (0, 1)),
        ("interleaved-1f1b", 2, 4, (0, 1, 0, 1)),
        ("zb-v", 2, 4, (0, 1, 1, 0)),
    ],
)
def test_placements_are_kept(
    schedule: str, chunks: int, stages: int, ranks: tuple[int, ...]
) -> None:
    plan = _large(_made(schedule, chunks), dp=2, tp=1, pp=8, micro_batches=64)
    strategy = lower_strategy(plan, 8)
    found = carry_plan(plan, strategy, _some).plan
    assert (found.schedule, len(found.rank_of), found.rank_of) == (schedule, stages, ranks)
    assert (found.dp, found.pp, found.micro_batches) == (2, 2, 4)


def test_recomputation_state_precision_and_overlap_are_kept() -> None:
    double = Precision("float64", "float64", "float64")
    plan = _large(
        replace(_made("1f1b"), recompute="solved", keep_bytes=(1000, 1000, -1, -1)), dp=8, tp=4,
        pp=4, state_shards=(StateShards(1, 1, 8, 4),) * 2 + (StateShards(8, 8, 8),) * 2,
        sequence_parallel=True, precision=double, sub_batches=(2, 2, 1, 1),
        machines=NOMINAL_GPU,
    )  # fmt: skip
    lowered = carry_plan(plan, lower_strategy(plan, 8), _some)
    found = lowered.plan
    assert found.sequence_parallel
    assert found.state_shards == (StateShards(1, 1, 2, 4), StateShards(2, 2, 2))
    assert found.precision == double
    assert found.sub_batches == (2, 1)
    assert [p.count for p in lowered.parts] == [2]
    assert found.keep_bytes[1] == -1
    assert 0 < found.keep_bytes[0] < 1 << 20
    kinds = {a.stage for o in lowered.schedule.orders for a in o if a.kind is ActionKind.RECOMPUTE}
    assert kinds == {0}


def test_what_blocks_keep_is_that_of_the_stages_before() -> None:
    kept = ("2 kept", "1 again, 1 kept", "3 again", "1 products")
    plan = _large(replace(_made("1f1b"), recompute="budget", kept_blocks=kept), pp=4)
    found = carry_plan(plan, lower_strategy(plan, 2), _some).plan
    assert (found.recompute, found.kept_blocks) == ("budget", (kept[0], kept[2]))


def _some(parts: int) -> Recording:
    """Two samples a micro-batch, whatever the number of micro-batches."""
    return recorded(8) if parts in (2, 4) else recorded(16)


def test_machines_decide_what_is_kept_and_gained() -> None:
    plan = _large(replace(_made("1f1b"), recompute="solved", keep_bytes=(0, 0)), tp=2)
    plan = replace(plan, sub_batches=(2, 2), machines=NOMINAL_CPU)
    strategy = lower_strategy(plan, 4)
    room, none = (
        carry_plan(plan, strategy, _some, replace(NOMINAL_GPU, memory_bytes=size))
        for size in (1 << 40, 1)
    )
    assert room.plan.keep_bytes == (-1, -1)
    assert none.plan.keep_bytes == (0, 0)
    assert room.plan.machines == replace(NOMINAL_GPU, memory_bytes=0)
    assert room.gains is not None
    assert max(room.gains) < 0.5


def test_chunks_of_products_that_are_left_are_kept() -> None:
    weight = "transformer.h.3.mlp.c_proj.weight"
    plan = replace(
        _large(_made("1f1b"), tp=2), sub_batches=(1, 1),
        row_chunks={weight: 2, "transformer.h.11.mlp.c_proj.weight": 2}, machines=NOMINAL_GPU,
    )  # fmt: skip
    lowered = carry_plan(plan, lower_strategy(plan, 4), _some)
    assert lowered.plan.row_chunks == {weight: 2}
    assert any("#" in node.name for node in lowered.local(1, 0).nodes)


def test_fused_products_stay_so_in_symmetric_memory() -> None:
    weight = "transformer.h.3.mlp.c_proj.weight"
    symmetric = replace(NOMINAL_GPU, symmetric_memory=True)
    plan = replace(
        _large(_made("1f1b"), tp=2), sub_batches=(1, 1),
        fused_products=("transformer.h.11.mlp.c_proj.weight", weight), machines=symmetric,
    )  # fmt: skip
    strategy = lower_strategy(plan, 4)
    assert carry_plan(plan, strategy, _some).plan.fused_products == (weight,)
    assert carry_plan(plan, strategy, _some, NOMINAL_GPU).plan.fused_products == ()
