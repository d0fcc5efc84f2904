"""What a search has beside its plan: the plans that lost, and what was refused."""

from __future__ import annotations

from dataclasses import dataclass

from merakc.ir.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Alternative:
    """A strategy that lost: what it should cost, and what `loses` it the comparison."""

    strategy: Strategy
    step_s: float
    peak_bytes: int
    loses: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """What cannot be: why, and what would have to change."""

    what: str
    why: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Alternatives:
    """The best of the others, the nearest first, and what was refused.

    They are compared by the costs of their pieces, by which a step of the chosen plan takes
    `chosen_s`; 0 where that is not known.
    """

    runners_up: tuple[Alternative, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    chosen_s: float = 0.0
