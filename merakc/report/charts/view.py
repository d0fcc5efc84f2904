"""What of a step a picture has room for, and where on it each moment lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from merakc.ir.program import Event
from merakc.ir.report import Timeline
from merakc.report.packing import middle, outside, unpack

# The part of a picture's width that stands for a middle that is left out.
GAP = 0.04


@dataclass(frozen=True, slots=True)
class Axis:
    """Time from left to right, with a gap in the place of what is left out."""

    end_s: float
    left_out_s: tuple[float, float] | None = None

    def place(self, time_s: float) -> float:
        """Where a moment lies, between 0 and 1."""
        if self.left_out_s is None:
            return min(time_s / self.end_s, 1.0) if self.end_s else 0.0
        first_s, last_s = self.left_out_s
        shown_s = self.end_s - (last_s - first_s)
        scale = (1.0 - GAP) / shown_s if shown_s else 0.0
        if time_s <= first_s:
            return time_s * scale
        if time_s >= last_s:
            return min((time_s - last_s + first_s) * scale + GAP, 1.0)
        return first_s * scale + GAP * (time_s - first_s) / (last_s - first_s)


@dataclass(frozen=True, slots=True)
class View:
    """The computes of each rank, the collectives over dp that run beside them, and when a rank
    stands still for those in a compute.
    """

    axis: Axis
    rows: dict[int, tuple[Event, ...]]
    collectives: tuple[Event, ...]
    waits: tuple[Event, ...] = ()


def view(timeline: Timeline, per_rank: int, ranks: Sequence[int]) -> View:
    """The whole step of these ranks, or its beginning and its end where they compute more than
    `per_rank` times.
    """
    moments = unpack(timeline)
    computes = [e for e in moments.events if not e.kind.is_message and e.end_s > e.start_s]
    cut = middle(computes, per_rank * max(len(ranks), 1))
    left_out_s = cut or timeline.left_out_s
    rows = {rank: outside([e for e in computes if e.rank == rank], left_out_s) for rank in ranks}
    axis = Axis(moments.step_s, left_out_s)
    others = (outside(own, left_out_s) for own in (moments.collectives, moments.waits))
    return View(axis, rows, *others)
