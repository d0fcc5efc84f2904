"""The plan in full of one strategy."""

from __future__ import annotations

from dataclasses import replace

from merakc.lowering.lowered import Lowered
from merakc.machines.cluster import NOMINAL_CPU
from merakc.planner.request import Request
from merakc.planner.search import cut_layout, plan_layout, standing, with_memory
from tests.planner.test_one_planner import record

ASKED = Request(2, 8, dp=1, tp=1, pp=2, micro_batches=4, schedule="zb-h1")


def peak_bytes(lowered: Lowered) -> int:
    assert lowered.prediction is not None
    return max(lowered.prediction.peak_bytes)


def test_a_plan_is_of_the_strategy_that_was_asked_for() -> None:
    plan = plan_layout(replace(ASKED, recompute="full"), record("gpt2"), NOMINAL_CPU).plan
    assert (plan.pp, plan.batch_size, plan.micro_batches, plan.samples) == (2, 8, 4, 2)
    assert (plan.schedule, plan.recompute, plan.chunks) == ("zb-h1", "full", 1)


def test_more_is_recomputed_only_where_less_does_not_fit() -> None:
    cut = cut_layout(ASKED, record("gpt2"), NOMINAL_CPU)
    roomy = with_memory(ASKED, cut, NOMINAL_CPU)
    assert roomy.plan.recompute == "none"
    tight = replace(NOMINAL_CPU, memory_bytes=peak_bytes(roomy) - 1)
    fitted = with_memory(ASKED, cut, tight)
    assert fitted.plan.recompute == "budget"
    assert peak_bytes(fitted) <= tight.memory_bytes
    assert standing(fitted, tight) < standing(roomy, tight)
