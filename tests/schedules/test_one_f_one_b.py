"""Orders with whole backwards, against the figures of their papers."""

from __future__ import annotations

import pytest

from benchmarks.schedules import late_recomputation
from merakc.ir.costs import StageCost
from merakc.schedules.check import check_schedule
from merakc.schedules.registry import make_schedule
from merakc.schedules.text import format_schedule
from merakc.schedules.timing import time_schedule
from tests.schedules.unit_costs import KEPT, peak, unit_costs, unit_time


def test_1f1b_as_text() -> None:
    assert format_schedule(make_schedule("1f1b", 3, 3)) == (
        "0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1F1 1B0 1F2 1B1 1B2\n2F0 2B0 2F1 2B1 2F2 2B2"
    )


def test_interleaved_as_text() -> None:
    assert format_schedule(make_schedule("interleaved-1f1b", 2, 2)) == (
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1\n1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"
    )


@pytest.mark.parametrize("ranks", range(1, 8))
def test_times_and_peaks(ranks: int) -> None:
    """(m + p - 1)(f + b); m micro-batches are held by GPipe, p - s by 1F1B's stage s."""
    for m in range(1, 3 * ranks):
        seconds = 3 * (m + ranks - 1)
        gpipe = unit_time(make_schedule("gpipe", ranks, m))
        assert (gpipe.makespan_s, gpipe.peak_bytes) == (seconds, (m * KEPT,) * ranks)
        one = unit_time(make_schedule("1f1b", ranks, m))
        assert one.makespan_s == seconds
        assert one.peak_bytes == tuple(min(m, ranks - s) * KEPT for s in range(ranks))


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_interleaved(ranks: int, chunks: int) -> None:
    """A bubble of (p - 1)(f + b) / v where p divides m, and runs for every other m."""
    for m in range(1, 4 * ranks + 1):
        schedule = make_schedule("interleaved-1f1b", ranks, m, virtual_stages=chunks)
        check_schedule(schedule)
        if m % ranks == 0:
            timing = unit_time(schedule)
            assert timing.makespan_s == pytest.approx(3 * m + 3 * (ranks - 1) / chunks)
            warmup = 2 * (ranks - 1) + (chunks - 1) * ranks
            held = min(m * chunks, warmup + 1) / chunks
            assert peak(timing) == pytest.approx(held, abs=0.05)


def test_the_ladder_of_merak() -> None:
    costs = unit_costs(4)
    full = make_schedule("1f1b", 4, 8, recompute="full")
    not_last = make_schedule("1f1b", 4, 8, recompute=range(3))
    assert unit_time(full, late_recomputation(costs, range(4))).makespan_s == 44
    assert unit_time(full).makespan_s == 41
    assert unit_time(not_last).makespan_s == 39
    merak = unit_time(make_schedule("merak", 4, 8))
    assert merak.makespan_s == 38
    assert peak(merak) == 1.15
    assert unit_time(make_schedule("1f1b", 4, 8)).makespan_s == 33


@pytest.mark.parametrize("ranks", range(2, 9))
def test_shifted_critical_path(ranks: int) -> None:
    """(m + p - 1)(f + b) + (m - 3) r + max(0, f + r - b), where recomputing is a forward again."""
    for m in range(3, 20):
        for f in (1, 2, 3):
            for b in (1, 2, 3, 5, 7):
                costs = [StageCost(f, b, recompute_s=f)] * ranks
                seconds = (m + ranks - 1) * (f + b) + (m - 3) * f + max(0, 2 * f - b)
                timing = time_schedule(make_schedule("merak", ranks, m), costs)
                assert timing.makespan_s == seconds


def test_merak_as_text() -> None:
    assert format_schedule(make_schedule("merak", 3, 4)).splitlines()[1:] == [
        "1F0 1F1 1F2 1R0 1B0 1R1 1B1 1F3 1R2 1B2 1R3 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]
    for m in (1, 2):
        check_schedule(make_schedule("merak", 3, m))
