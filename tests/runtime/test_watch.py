"""Collectives on forked ranks, with the times at which they ran."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from benchmarks.ranks import run_ranks
from merakc.ir.program import CollectiveEvent
from merakc.kernels.collectives import (
    all_reduce_now,
    bind_axis,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
    watched,
)
from merakc.runtime.watch import Clock, Watch

LARGE = 1 << 20  # elements; some milliseconds between two ranks of a machine
BESIDE_S = 0.05


def watch_all() -> tuple[tuple[CollectiveEvent, ...], float]:
    assert dist.group.WORLD is not None
    bind_axis("tp", dist.group.WORLD)
    rank, x = dist.get_rank(), torch.ones(LARGE)
    watch = Watch(Clock())
    all_reduce_now(x, "tp", "sum")
    with watched(watch):
        all_reduce_now(x, "tp", "sum")
        pending = start_all_reduce(x, "tp", "sum")
        while watch.works[-1].end is None:
            time.sleep(BESIDE_S)
        pending.wait()
        gathered = start_all_gather(x, "tp", 0, (LARGE, LARGE), rank).wait()
        start_reduce_scatter(gathered, "tp", 0, (LARGE, LARGE), rank).wait()
        left = start_all_reduce(x, "tp", "sum")  # nobody waits
    dist.barrier()
    all_reduce_now(x, "tp", "sum")
    del left
    return watch.events(rank), watch.clock.seconds(watch.clock.now())


def test_collectives_are_timed_while_they_are_watched() -> None:
    for rank, (events, end_s) in enumerate(run_ranks(2, watch_all)):
        assert [(e.rank, e.op, e.axis) for e in events] == [
            (rank, op, "tp")
            for op in ("all_reduce", "all_reduce", "all_gather", "reduce_scatter", "all_reduce")
        ]
        assert [e.size_bytes // (4 * LARGE) for e in events] == [1, 1, 2, 2, 1]
        for e in events:
            assert 0 < e.start_s < e.end_s < end_s
            assert e.start_s < e.issued_s <= e.wait_start_s <= e.wait_end_s
        blocking, beside, *_, left = events
        assert blocking.wait_end_s >= blocking.end_s
        assert blocking.hidden_s < (blocking.end_s - blocking.start_s) / 2  # 1 us, if undisturbed
        # It ends while the rank does something else, and not when that asks for it.
        assert beside.wait_start_s - beside.issued_s >= BESIDE_S
        assert beside.end_s < beside.wait_start_s
        assert beside.hidden_s == max(0.0, beside.end_s - beside.issued_s)
        assert left.wait_start_s == left.wait_end_s


def test_what_is_issued_past_the_watch_is_its_own() -> None:
    calls: list[str] = []
    watch = Watch(Clock())
    with pytest.raises(ZeroDivisionError), watched(watch):
        watch("all_reduce", "tp", 8, lambda: calls.append("issued") or 1 / 0)
    assert calls == ["issued"]
    assert watch.works == []
