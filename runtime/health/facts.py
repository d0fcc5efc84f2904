"""What ranks tell each other about themselves, and what comes of it where one is missing."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from merakc.errors import MerakError, MismatchError, StuckError

ALL = "all"  # the scope of what all ranks have in common
# Calls that say what comes next, and the most sequences of them that are remembered.
_CONTEXT, _MOST = 8, 4096


class State(StrEnum):
    """Where a rank is with its last call."""

    IN = "in"
    OUT = "out"
    FAILED = "failed"  # left with an error of its own
    BROKEN = "broken"  # a message or collective failed; it waits to hear why


@dataclass(frozen=True, slots=True)
class Status:
    """Where a rank is: the number and name of the last call that all ranks must make, and `facts`
    that ranks have in common there, by scope: `ALL`, or the numbers of ranks with commas between.

    `asks` are the scopes of which it waits to hear that they agree; `text` says what failed.
    """

    call: int = 0
    name: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    state: State = State.OUT
    doing: str = ""
    text: str = ""
    asks: tuple[str, ...] = ()

    def words(self) -> str:
        """For people."""
        if self.call == 0:
            return "before its first call"
        call = f"call {self.call}, {self.name}"
        if self.state is State.OUT:
            return f"outside any call, after {call}"
        at = f", at {self.doing}" if self.doing else ""
        return (
            f"in {call}{at}" if self.state is not State.FAILED else f"behind {call}, which failed"
        )

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> Status:
        """From what was sent."""
        return cls(**{**told, "state": State(told["state"]), "asks": tuple(told["asks"])})


@dataclass(frozen=True, slots=True)
class Fault:
    """Why the ranks cannot go on: `ranks` are those to look at, `text` begins with them."""

    ranks: tuple[int, ...]
    text: str
    mismatch: bool = False

    @classmethod
    def read(cls, told: Sequence[Any]) -> Fault:
        """From what was sent."""
        ranks, text, mismatch = told
        return cls(tuple(ranks), text, mismatch)

    def told(self) -> list[Any]:
        """As it is sent."""
        return [list(self.ranks), self.text, self.mismatch]

    def error(self, rank: int, here: Status, timeout_s: float) -> MerakError:
        """The error that a rank raises."""
        if self.mismatch:
            return MismatchError(f"{self.text}; every rank must make the same calls")
        own = f"rank {rank} was {here.words()}" if rank not in self.ranks else "this is that rank"
        return StuckError(f"{self.text} ({own}; timeout_s={timeout_s:g})")


class Expected:
    """What comes next in one sequence of calls: what came after the same few calls before.

    Ranks with the same past expect the same, so that nobody need ask where it comes.
    """

    def __init__(self) -> None:
        self.last: deque[str] = deque(maxlen=_CONTEXT)
        self.after: dict[tuple[str, ...], str] = {}

    def comes(self, fact: str) -> bool:
        """Notes the next one; whether it was expected."""
        before = tuple(self.last)
        known = self.after.get(before) == fact
        if len(self.after) >= _MOST:
            self.after.clear()
        self.after[before] = fact
        self.last.append(fact)
        return known
