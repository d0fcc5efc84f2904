"""In how many shards stages keep their state."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from unittest.mock import patch

import pytest

from benchmarks.models import MODELS
from merakc.frontend.record import Recording
from merakc.ir.state import lattice
from merakc.lowering import state_shards as shards
from merakc.lowering.lowered import Lowered
from merakc.lowering.state_shards import choose_shards
from merakc.machines.cluster import NOMINAL_CPU, Cluster
from merakc.planner.request import Request
from merakc.planner.search import cut_layout
from tests.recorded import one_of_several
from tests.small_buckets import small_buckets

SLOW = replace(NOMINAL_CPU, link_bytes_per_s=1e6, link_latency_s=1e-3)


@cache
def recording(samples: int) -> Recording:
    case = MODELS["gpt2"]
    return one_of_several(case.model(), case.batch(samples))


@cache
def planned(schedule: str, recompute: str = "none") -> Lowered:
    request = Request(8, 8, dp=4, tp=1, pp=2, micro_batches=4, schedule=schedule)
    lowered = cut_layout(request, recording, NOMINAL_CPU)
    return replace(lowered, plan=replace(lowered.plan, recompute=recompute))


@pytest.mark.parametrize(
    ("schedule", "recompute"), [("1f1b", "none"), ("1f1b", "stage"), ("zb-v", "none")]
)
@pytest.mark.parametrize("cluster", [NOMINAL_CPU, SLOW], ids=["fast", "slow"])
@small_buckets()
def test_no_rank_ends_before_its_bound(schedule: str, recompute: str, cluster: Cluster) -> None:
    lowered = planned(schedule, recompute)
    trial = shards._Trial(lowered, cluster)
    shares = []
    for way in lattice(4):
        plan = replace(lowered.plan, state_shards=(way,) * len(lowered.plan.rank_of))
        tried = replace(lowered, plan=plan)
        step_s, _ = trial.run(tried, 1)
        shares.append(max(trial.least_s(tried)) / step_s)
    assert max(shares) <= 1 + 1e-12
    # Where links are slow, steps are little more than collectives.
    assert cluster is not SLOW or max(shares) > 0.7


@small_buckets()
def test_what_the_bound_leaves_out_is_not_simulated_and_not_chosen() -> None:
    lowered, simulated = planned("1f1b"), []
    run = shards._Trial.run

    def seen(self: shards._Trial, tried: Lowered, scale: int) -> object:
        simulated.append(tried)
        return run(self, tried, scale)

    with patch.object(shards._Trial, "run", seen):
        some = choose_shards(lowered, SLOW)
        count = len(simulated)
        with patch.object(shards._Trial, "least_s", lambda self, tried: [0.0]):
            every = choose_shards(lowered, SLOW)
    assert some == every
    assert count < len(simulated) - count
