"""The plan in full of one strategy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from merakc.ir.state import StateShards
from merakc.lowering.lowered import Lowered
from merakc.lowering.predict import predict
from merakc.machines.cluster import NOMINAL_CPU
from merakc.machines.cluster_files import hardware_for
from merakc.planner.choose import compare
from merakc.planner.offline import Recordings
from merakc.planner.request import Request
from merakc.planner.search import cut_layout, plan_layout, standing, with_memory
from merakc.planner.sources.source import load_source
from tests.planner.test_one_planner import record

DEEP = Recordings(load_source("tests.small_source:deep"), Request(0, 0), lambda _: None)
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


@pytest.mark.parametrize("ranks", [8, 64, 512, 2048])
def test_pieces_price_what_the_plan_waits_for(ranks: int) -> None:
    """State in a shard on every rank: both take as large buckets as pay."""
    cluster = hardware_for("h100+tf32", ranks).flat("float32")
    request = Request(
        ranks, 0, dp=ranks, tp=1, pp=1, micro_batches=1, state_shards="zero-3",
        total_batch_size=16 * ranks,
    )  # fmt: skip
    (priced,) = compare(request, DEEP, cluster).ranked
    lowered = plan_layout(request.decided(priced.strategy), DEEP, cluster)
    assert lowered.prediction is not None
    step_s, estimate = lowered.prediction.step_s, priced.estimate
    assert estimate.step_s - estimate.optimizer_s == pytest.approx(step_s, rel=0.03)
    (shards,) = lowered.plan.state_shards
    assert shards.bucket_scale == priced.strategy.shards(0).bucket_scale
    small = replace(lowered.plan, state_shards=(StateShards(*shards.counts),))
    usual, _ = predict(replace(lowered, plan=small), cluster, dp_rank=0)
    assert usual.step_s > {8: 1.01, 64: 1.2, 512: 3.0, 2048: 5.0}[ranks] * step_s
