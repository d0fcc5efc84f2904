"""Stages of one second a forward, input gradient, weight gradient and recomputation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.schedules import UNIT as UNIT_OF_MANY_BYTES
from benchmarks.schedules import split_stages
from merakc.ir.costs import StageCost
from merakc.ir.program import Action
from merakc.ir.schedule import Schedule
from merakc.schedules.timing import Timing, time_schedule

KEPT = 1000  # bytes of one micro-batch of one rank
UNIT = replace(
    UNIT_OF_MANY_BYTES, saved_bytes=KEPT, checkpoint_bytes=KEPT // 20, deferred_bytes=KEPT
)


def unit_costs(ranks: int, chunks: int = 1) -> tuple[StageCost, ...]:
    return split_stages([UNIT] * ranks, chunks)


def unit_time(schedule: Schedule, costs: Sequence[StageCost] | None = None) -> Timing:
    chunks = schedule.stages // schedule.ranks
    return time_schedule(schedule, costs or unit_costs(schedule.ranks, chunks))


def peak(timing: Timing) -> float:
    """In micro-batches of one rank."""
    return max(timing.peak_bytes) / KEPT


def action_times(schedule: Schedule, timing: Timing) -> dict[Action, tuple[float, float]]:
    """Start and end by action."""
    return {
        action: (start, end)
        for order, starts, ends in zip(schedule.orders, timing.start_s, timing.end_s, strict=True)
        for action, start, end in zip(order, starts, ends, strict=True)
    }
