"""Where the time of a step goes: why ranks are idle."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from merakc.ir.program import ActionKind, Event


@dataclass(frozen=True, slots=True)
class Idle:
    """The idle seconds of one rank.

    `warm_up_s` are before its first compute and `cool_down_s` after its last one, `waiting_s`
    those in between by the message that is waited for, longest first.
    """

    rank: int
    warm_up_s: float
    cool_down_s: float
    waiting_s: tuple[tuple[str, float], ...]

    @property
    def total_s(self) -> float:
        """All idle seconds of the step."""
        return self.warm_up_s + self.cool_down_s + sum(s for _, s in self.waiting_s)


def idle_split(events: Sequence[Event]) -> tuple[Idle, ...]:
    """The idle time of every rank by its cause, from simulated or measured events."""
    step_s = max((e.end_s for e in events), default=0.0)
    per_rank: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        per_rank[event.rank].append(event)
    return tuple(_split(rank, own, step_s) for rank, own in sorted(per_rank.items()))


def _split(rank: int, events: Sequence[Event], step_s: float) -> Idle:
    busy = [e for e in events if not e.kind.is_message]
    if not busy:
        return Idle(rank, step_s, 0.0, ())
    first_s, last_s = min(e.start_s for e in busy), max(e.end_s for e in busy)
    waiting: dict[str, float] = defaultdict(float)
    for event in events:
        if event.kind is ActionKind.RECV:
            inside_s = min(event.end_s, last_s) - max(event.start_s, first_s)
            if inside_s > 0:
                waiting[event.label] += inside_s
    ordered = sorted(waiting.items(), key=lambda item: -item[1])
    return Idle(rank, first_s, step_s - last_s, tuple(ordered))
