"""Steps of many micro-batches, from simulations of fewer.

Between its warm-up and its cool-down a pipeline does the same again with each period of
micro-batches. When everything ends in a period follows from when it ended in some periods before:
where all of these were alike on all ranks, computes, messages and bytes, so are those that come.
Two alike are not enough where a message is read some periods after it was sent: a zero-bubble
pipeline of two ranks took 377, 377 and 414 µs for three micro-batches, again and again.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from merakc.costs.streams import Streams
from merakc.ir.program import ActionKind, Program

# Seconds of two periods that differ by no more, as a share of them, are the same.
SAME = 1e-9


class UnsteadyError(Exception):
    """A rank does not do the same again in the same time."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """So many `periods`, of `period` micro-batches each, are left out behind the backwards of
    `first` micro-batches and of the periods that are to be `alike`: one more than messages reach.
    """

    first: int
    period: int
    periods: int
    alike: int = 2


class Seconds(NamedTuple):
    """Seconds of a rank since the start of a step, or in a period: in all, waited for collectives
    over dp, of what these take, computing, and what they have still to do.
    """

    now_s: float
    exposed_s: float
    posted_s: float
    busy_s: float
    left_s: float

    def since(self, before: Seconds) -> Seconds:
        """Those between."""
        return Seconds(*map(operator.sub, self, before))

    def times(self, count: int) -> Seconds:
        """Of so many."""
        return Seconds(*(count * seconds for seconds in self))


@dataclass(slots=True)
class Pace:
    """What a rank takes for a period.

    `computes` are those of a micro-batch, `stages` those of the rank.
    """

    left_out: LeftOut
    computes: int
    stages: int
    period: Seconds | None = None
    _backwards: int = 0
    # Since the last mark: the ends of computes, and when messages arrived that were read.
    _ends: list[float] = field(default_factory=list)
    _arrivals: list[float] = field(default_factory=list)
    _marks: list[tuple[Seconds, int, list[float], list[float]]] = field(default_factory=list)

    @classmethod
    def of(cls, program: Program, left_out: LeftOut) -> Pace:
        """The pace of one rank's Program."""
        first = [a for a in program.actions if a.kind.is_compute and a.micro_batch == 0]
        return cls(left_out, len(first), len({a.stage for a in first}))

    def arrived(self, at_s: float) -> None:
        """Notes when a message was there that is read now."""
        self._arrivals.append(at_s)

    def note(self, kind: ActionKind, clock: Streams, busy_s: float, held_bytes: int) -> None:
        """Notes the end of a compute. Raises `UnsteadyError` at the end of the periods that are to
        be alike where they were not; there the clock gets what its collectives lag behind more with
        each period that is left out.
        """
        self._ends.append(clock.now_s)
        self._backwards += kind.sends_gradients
        behind = self._backwards - self.stages * self.left_out.first
        marked = behind == self.stages * self.left_out.period * len(self._marks)
        if not (marked and kind.sends_gradients) or self.period is not None:
            return
        now = Seconds(clock.now_s, clock.exposed_s, clock.posted_s, busy_s, clock.left_s())
        self._marks.append((now, held_bytes, self._ends, self._arrivals))
        self._ends, self._arrivals = [], []
        if len(self._marks) == 1 + self.left_out.alike:
            self.period = self._checked()
            clock.fall_behind(self.left_out.periods * self.period.left_s)

    def _checked(self) -> Seconds:
        """The seconds of a period."""
        took = self._marks[-1][0].since(self._marks[-2][0])
        least_s = SAME * took.now_s
        computes = self.computes * self.left_out.period
        figures: list[list[float]] = []
        for (start, *_), (now, _, ends, arrivals) in pairwise(self._marks):
            if len(ends) != computes or len(arrivals) != len(self._marks[-1][3]):
                raise UnsteadyError
            figures.append([*now.since(start), *(s - start.now_s for s in ends + arrivals)])
        if (
            any(
                abs(s - e) > least_s
                for own in figures
                for s, e in zip(own, figures[-1], strict=True)
            )
            or len({held_bytes for _, held_bytes, _, _ in self._marks}) > 1
            or took.left_s < -least_s
        ):
            raise UnsteadyError
        return took if abs(took.left_s) > least_s else took._replace(left_s=0.0)


def left_out_seconds(paces: Sequence[Pace]) -> list[Seconds]:
    """What each rank takes for all that is left out. Raises `UnsteadyError` where one is faster
    than others.
    """
    periods = [pace.period for pace in paces if pace.period is not None]
    each = [period.now_s for period in periods]
    if len(periods) < len(paces) or max(each) - min(each) > SAME * max(each):
        raise UnsteadyError
    return [p.period.times(p.left_out.periods) for p in paces if p.period is not None]
