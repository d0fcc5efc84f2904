"""What a plan would cost otherwise: the same decisions, and figures that move as they should."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import transformers

from merakc.errors import ConfigError, PlanError
from merakc.ir.plan import Plan
from merakc.ir.plan_file import PlanFile
from merakc.ir.state import StateShards
from merakc.lowering.lowered import Lowered
from merakc.machines.cluster import NOMINAL_GPU
from merakc.planner.offline import plan_offline
from merakc.planner.request import Request
from merakc.planner.sources.source import Source, source_of
from merakc.planner.what_if import changed, changed_strategy, simulated


@cache
def gpt2() -> Source:
    config = transformers.GPT2Config(
        n_layer=8, n_embd=256, n_head=4, vocab_size=512, n_positions=128
    )
    return source_of("gpt2", config)


@cache
def planned() -> Lowered:
    request = Request(4, 0, dp=2, tp=1, pp=2, micro_batches=4, schedule="1f1b",
                      state_shards="zero-1", recompute="none")  # fmt: skip
    return plan_offline(gpt2(), request, 16, NOMINAL_GPU)[0]


def plan() -> Plan:
    return planned().plan


def _step_s(found: PlanFile) -> float:
    assert found.prediction is not None
    return found.prediction.step_s


def _peak_bytes(found: PlanFile) -> int:
    assert found.prediction is not None
    return max(found.prediction.peak_bytes)


def test_nothing_changed_costs_the_same() -> None:
    before = simulated(plan(), gpt2(), NOMINAL_GPU)
    assert before.prediction == planned().prediction
    after = changed(plan(), gpt2(), Request(0, 0), NOMINAL_GPU)
    assert after.decisions == before.decisions
    assert _step_s(after) == pytest.approx(_step_s(before), rel=1e-6)


def test_figures_move_as_they_should() -> None:
    before = simulated(plan(), gpt2(), NOMINAL_GPU)
    twice = changed(plan(), gpt2(), Request(0, 0, total_batch_size=32), NOMINAL_GPU)
    assert (twice.decisions.micro_batches, twice.decisions.batch_size) == (8, 16), (
        "micro-batches stay as large"
    )
    assert 1.5 < _step_s(twice) / _step_s(before) < 2.0
    bubbles = [p.prediction.bubble_share for p in (before, twice) if p.prediction]
    assert bubbles[1] < bubbles[0]
    slow = replace(NOMINAL_GPU, flops_per_s=1e12, bytes_per_s=1e11, op_overhead_s=1e-4)
    assert _step_s(changed(plan(), gpt2(), Request(0, 0), slow)) > 5 * _step_s(before)
    deep = changed(plan(), gpt2(), Request(0, 0, pp=4), NOMINAL_GPU)
    four = deep.decisions
    assert (four.pp, four.schedule, len(four.stages)) == (4, "1f1b", len(four.rank_of))
    assert _peak_bytes(deep) < _peak_bytes(before)
    wide = changed(plan(), gpt2(), Request(0, 0, dp=4), NOMINAL_GPU)
    assert wide.decisions.state_shards == (StateShards(1, 1, 4),) * 2
    shared = changed(plan(), gpt2(), Request(0, 0, cp=2), NOMINAL_GPU)
    assert (shared.decisions.cp, shared.decisions.state_shards) == (2, (StateShards(1, 1, 4),) * 2)
    assert _peak_bytes(shared) < _peak_bytes(before)
    folded = changed(plan(), gpt2(), Request(0, 0, schedule="zb-v"), NOMINAL_GPU)
    assert folded.decisions.rank_of == (0, 1, 1, 0)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (Request(0, 0, total_batch_size=15), "15 samples does not divide over dp=2"),
        (
            Request(0, 0, total_batch_size=6),
            "3 samples cannot be divided into micro-batches of 2",
        ),
        (
            Request(0, 0, micro_batches=3),
            "8 samples cannot be divided into 3 micro-batches",
        ),
        (Request(0, 0, schedule="best"), "schedule 'best' is not known"),
    ],
)
def test_numbers_that_do_not_divide_are_refused(changes: Request, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        changed_strategy(plan(), changes)


def test_experts_are_shared_as_long_as_sequences_are() -> None:
    experts = replace(plan(), cp=2, expert_parallel=True)
    assert changed_strategy(experts, Request(0, 0, cp=4)).expert_parallel
    assert not changed_strategy(experts, Request(0, 0, cp=1)).expert_parallel
    assert changed_strategy(experts, Request(0, 0, tp=2)).degrees == "dp=2 ep=2 tp=2 pp=2"


def test_an_order_of_work_is_for_its_ranks() -> None:
    ordered = replace(plan(), order=("0F0", "1F0"))
    with pytest.raises(ConfigError, match="4 micro-batches on 2 pipeline ranks, and there are to"):
        changed_strategy(ordered, Request(0, 0, total_batch_size=32))
    assert (
        changed_strategy(ordered, Request(0, 0, total_batch_size=32, schedule="1f1b")).micro_batches
        == 8
    )


def test_a_plan_of_another_model_is_refused() -> None:
    other = source_of("gpt2", transformers.GPT2Config(n_layer=2), 128)
    with pytest.raises(PlanError, match="made for another graph"):
        simulated(plan(), other, NOMINAL_GPU)
