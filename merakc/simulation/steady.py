"""Steps of many micro-batches, from simulations of fewer.

Between its warm-up and its cool-down a pipeline does the same again with each period of
micro-batches. Where a simulation shows that, in the same time and with the same bytes on all ranks,
the periods that it leaves out take as long each as those that it has.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
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
    `first` micro-batches and two periods more.
    """

    first: int
    period: int
    periods: int


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
    _computed: int = 0
    _backwards: int = 0
    _marks: list[tuple[Seconds, int, int]] = field(default_factory=list)

    @classmethod
    def of(cls, program: Program, left_out: LeftOut) -> Pace:
        """The pace of one rank's Program."""
        first = [a for a in program.actions if a.kind.is_compute and a.micro_batch == 0]
        return cls(left_out, len(first), len({a.stage for a in first}))

    def note(self, kind: ActionKind, clock: Streams, busy_s: float, held_bytes: int) -> None:
        """Notes the end of a compute. Raises `UnsteadyError` at the third mark, where the second
        period was not as the first; there the clock gets what its collectives lag behind more with
        each period that is left out.
        """
        self._computed += 1
        self._backwards += kind.sends_gradients
        behind = self._backwards - self.stages * self.left_out.first
        marked = behind == self.stages * self.left_out.period * len(self._marks)
        if not (marked and kind.sends_gradients) or self.period is not None:
            return
        now = Seconds(clock.now_s, clock.exposed_s, clock.posted_s, busy_s, clock.left_s())
        self._marks.append((now, self._computed, held_bytes))
        if len(self._marks) == 3:
            self.period = self._checked()
            clock.fall_behind(self.left_out.periods * self.period.left_s)

    def _checked(self) -> Seconds:
        """The seconds of a period."""
        (first, *before), (second, *between), (third, *after) = self._marks
        took, computes = third.since(second), self.computes * self.left_out.period
        least_s = SAME * took.now_s
        if (
            any(abs(s) > least_s for s in took.since(second.since(first)))
            or [between[0] - before[0], after[0] - between[0]] != [computes] * 2
            or not before[1] == between[1] == after[1]
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
