"""What a strategy costs is not below what it seems to cost at first."""

from __future__ import annotations

import pytest

from merakc.costs.state import MIXED
from merakc.machines.cluster import Hardware
from merakc.planner import candidates
from merakc.planner.candidates import Candidates, open_strategies
from merakc.planner.pricing import (
    FAR,
    Bounds,
    Shortage,
    holds,
    job_of,
    outlook_of,
    price,
    shortest_sample_s,
)
from merakc.planner.request import Request
from tests.planner.test_candidates import BATCH, HARDWARE, TABLE, find, mixed, with_memory

SAME = 1 - 1e-9


@pytest.mark.parametrize("memory_bytes", [1 << 34, 1 << 20, 1 << 19])
def test_nothing_is_below_its_outlook(memory_bytes: int) -> None:
    request, hardware = Request(8, 0, total_batch_size=BATCH), with_memory(memory_bytes)
    priced = again = in_order = 0
    for strategy in open_strategies(Candidates(TABLE), request, hardware):
        outlook = outlook_of(job_of(TABLE, strategy, hardware, MIXED), request, hardware)
        assert SAME * shortest_sample_s(outlook.job) <= FAR * outlook.in_full_s
        found = price(outlook, request, hardware)
        if isinstance(found, Shortage):
            continue
        priced += 1
        again += found.strategy.recompute != "none"
        in_order += outlook.ordered_s < SAME * found.estimate.step_s
        assert found.sample_s >= SAME * outlook.sample_s
        # A plan in full need not make again what its pieces do.
        assert found.least_sample_s <= outlook.sample_s / FAR / SAME
        assert found.estimate.step_s >= SAME * outlook.ordered_s
        assert outlook.in_full_s <= outlook.sample_s
    assert priced > 20
    assert in_order > 10
    assert again > 10 or memory_bytes == 1 << 34


def test_shards_that_no_rank_has_room_for_are_not_looked_at() -> None:
    request = Request(8, 0, total_batch_size=BATCH, dp=8, tp=1, pp=1)
    strategy, *_ = open_strategies(Candidates(TABLE), request, HARDWARE)
    roomy = outlook_of(job_of(TABLE, strategy, HARDWARE, MIXED), request, HARDWARE)
    (least, *_, most) = sorted(max(roomy.job.state_bytes(one)) for one in roomy.waits)
    tight = with_memory((least + most) // 2)
    found = outlook_of(job_of(TABLE, strategy, tight, MIXED), request, tight)
    assert 0 < len(found.waits) < len(roomy.waits)
    assert all(holds(found.job, one) for one in found.waits)


@pytest.mark.parametrize("hardware", [HARDWARE, mixed()], ids=["alike", "unlike"])
def test_bounds_hold(hardware: Hardware, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "RUNNERS_UP", 10**6)
    bounds, everything = Bounds(TABLE, hardware), find(Request(8, 0), hardware).ranked
    assert len({one.strategy.mesh for one in everything}) > 5
    for one in everything:
        assert bounds.of(one.strategy) <= one.estimate.pipeline_s * (1 + 1e-9)
