"""Finds out which rank is to blame, from what all ranks say of themselves; without sockets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from merakc.runtime.health.facts import ALL, Fault, State, Status

# A rank beats twice a second: one that has not for so long is taken for stopped, where some rank
# has a reason to ask.
SILENT_S = 2.0
# How long it is waited for the news of a closed connection, after another rank's message failed.
GRACE_S = 1.0
# How long others may take to fail in the same call as a rank that lives on: mistakes that all ranks
# make are refused on all of them, not at the same moment.
FAILS_ALIKE_S = 5.0
# How long a rank waits for others that have told nothing yet before they are asked.
ASK_S = 0.005
# Calls that are remembered, for ranks that are behind.
CALLS = 64

Message = dict[str, Any]


@dataclass(slots=True)
class Seen:
    """What is known of one rank."""

    heard_s: float
    status: Status = field(default_factory=Status)
    since_s: float = 0.0  # when its status became what it is, but for what it is doing
    ended: bool = False  # it said goodbye
    text: str = ""  # with which error
    failed: int = 0  # the last call that it failed in
    why: str = ""
    failed_s: float = 0.0


class Judge:
    """The judge of one job. `out` are messages to ranks, to be sent by whoever calls."""

    def __init__(self, world: int, timeout_s: float, clock: Callable[[], float]) -> None:
        self.timeout_s, self.clock = timeout_s, clock
        self.seen = [Seen(clock()) for _ in range(world)]
        self.fault: Fault | None = None
        self.said: dict[int, dict[str, dict[int, str]]] = {}  # by call, scope and rank
        self.asked: dict[tuple[int, int], tuple[float, tuple[str, ...]]] = {}  # by rank and call
        self.wanted: set[tuple[int, str]] = set()  # calls and scopes in them that are asked for
        self.told: set[tuple[int, int]] = set()  # of which the ranks that are late were asked
        self.out: list[tuple[int, Message]] = []

    # ------------------------------------------------------------------ what comes in

    def hear(self, rank: int, status: Status) -> None:
        """A rank says where it is."""
        seen, now = self.seen[rank], self.clock()
        seen.heard_s = now
        before = seen.status
        if status.call < before.call:  # of a call that lies behind it: it was asked
            self._compare(rank, status)
            self._answer()
            return
        seen.status = status
        if (before.call, before.state) != (status.call, status.state):
            seen.since_s = now
            if status.state is State.FAILED:
                seen.failed, seen.why, seen.failed_s = status.call, status.text, now
        if self.fault is not None:
            return
        if status.asks:
            self.asked.setdefault((rank, status.call), (now, status.asks))
            self.wanted.update((status.call, scope) for scope in status.asks)
        if before.call != status.call:
            self._compare(rank, status)
        self._answer()
        if status.state in (State.FAILED, State.BROKEN):
            self.look()

    def gone(self, rank: int) -> None:
        """A rank's connection was closed, and it had not said goodbye."""
        seen = self.seen[rank]
        if seen.ended:
            return
        seen.ended = True
        if not seen.text and seen.failed == seen.status.call and seen.why:
            self._blame(rank, f"ended after it failed in {_call(seen.status)}: {seen.why}")
        else:
            self._blame(rank, lost(seen.text, seen.status))

    def end(self, rank: int, status: Status, text: str) -> None:
        """A rank says goodbye; with the error that ended it, if there is one."""
        self.hear(rank, status)
        self.seen[rank].ended, self.seen[rank].text = True, text
        self.look()

    def paused(self) -> None:
        """This process stood still itself: nobody else was silent."""
        for seen in self.seen:
            seen.heard_s = self.clock()

    # ------------------------------------------------------------------ agreement

    def _compare(self, rank: int, status: Status) -> None:
        call = status.call
        of_call = self.said.setdefault(call, {})
        for scope, fact in status.facts.items():
            facts = of_call.setdefault(scope, {})
            other = next(iter(facts.values()), fact)
            facts[rank] = fact
            if fact != other:
                self._blame_others(call, facts)
        if call - CALLS in self.said:
            for old in [c for c in self.said if c <= call - CALLS]:
                del self.said[old]

    def _blame_others(self, call: int, facts: dict[int, str]) -> None:
        """Names those that are fewer; of as many, those whose call was not to be expected."""
        common, count = Counter(facts.values()).most_common(1)[0]
        odd = [r for r, fact in sorted(facts.items()) if fact != common]
        if 2 * count <= len(facts):
            asked = [r for r in sorted(facts) if (r, call) in self.asked]
            others = {facts[r] for r in facts if r not in asked}
            odd, common = (asked, others.pop()) if len(others) == 1 else (sorted(facts), "")
        told = "; ".join(f"rank {r} is in {facts[r]}" for r in odd[:8])
        rest = f"; the others in {common}" if common else ""
        names = ("rank " if len(odd) == 1 else "ranks ") + ", ".join(map(str, odd[:8]))
        text = f"{names} went another way at call {call}: {told}{rest}"
        self._fail(Fault(tuple(odd), text, mismatch=True))

    def _late(self, call: int, scope: str) -> list[int]:
        """The ranks of a scope that have not come to a call."""
        came = self.said.get(call, {}).get(scope, {})
        if len(came) == len(self.seen):
            return []
        members = range(len(self.seen)) if scope == ALL else map(int, scope.split(","))
        return [r for r in members if r not in came]

    def _answer(self) -> None:
        """Tells ranks that asked that all others have come, and said the same."""
        if self.fault is not None:
            return
        come = {key for key in self.wanted if self._have_come(*key)}
        if not come:
            return
        for (rank, call), (_, scopes) in list(self.asked.items()):
            if not any((call, s) in self.wanted and (call, s) not in come for s in scopes):
                del self.asked[rank, call]
                self.out.append((rank, {"agreed": call}))
        self.wanted -= come

    def _have_come(self, call: int, scope: str) -> bool:
        members = len(self.seen) if scope == ALL else 1 + scope.count(",")
        return len(self.said.get(call, {}).get(scope, {})) == members

    # ------------------------------------------------------------------ what time brings

    def due_s(self) -> float:
        """Seconds until `look` may find something, but for beats that stay away."""
        if self.fault is not None:
            return float("inf")
        waits = [at + ASK_S for key, (at, _) in self.asked.items() if key not in self.told]
        waits += [s.since_s + GRACE_S for s in self.seen if s.status.state is State.BROKEN]
        return max(0.0, min(waits) - self.clock()) if waits else float("inf")

    def look(self) -> None:
        """Looks for ranks that are missing."""
        now = self.clock()
        for (rank, call), (at, scopes) in self.asked.items():
            if now >= at + ASK_S and (rank, call) not in self.told:
                self.told.add((rank, call))
                for late in {r for scope in scopes for r in self._late(call, scope)}:
                    self.out.append((late, {"pending": call}))
        self.told &= self.asked.keys()
        self._answer()
        waiting = {
            r: seen.status.call
            for r, seen in enumerate(self.seen)
            if seen.status.state in (State.IN, State.BROKEN)
        }
        for rank, seen in enumerate(self.seen):
            if seen.ended or seen.failed:
                self._look_at(rank, seen, waiting)
            elif now > seen.heard_s + self.timeout_s:
                self._silent(rank)
        for rank in waiting:
            if self.seen[rank].status.state is State.BROKEN:
                self._explain(rank, self.seen[rank])
        for (rank, call), (at, scopes) in self.asked.items():
            if now > at + self.timeout_s:
                self._missing(rank, sorted({r for s in scopes for r in self._late(call, s)}))

    def _look_at(self, rank: int, seen: Seen, waiting: dict[int, int]) -> None:
        """Whether a rank that has ended or failed is waited for; ranks wait in these calls."""
        now, here = self.clock(), seen.status
        ahead = next((r for r, call in waiting.items() if r != rank and call > here.call), None)
        beside = next((r for r, c in waiting.items() if r != rank and c == seen.failed), None)
        if beside is not None and (seen.ended or now > seen.failed_s + FAILS_ALIKE_S):
            self._blame(rank, f"failed in {_call(self.seen[beside].status)}: {seen.why}")
        elif seen.ended and ahead is not None:
            how = f"ended with {seen.text}" if seen.text else "has ended"
            self._blame(rank, f"{how}, {here.words()}; rank {ahead} is {self._words(ahead)}")
        elif not seen.ended and now > seen.heard_s + self.timeout_s:
            self._silent(rank)

    def _explain(self, rank: int, seen: Seen) -> None:
        """Why a message or a collective failed on a rank."""
        now, others = self.clock(), [r for r in range(len(self.seen)) if r != rank]
        silent = [r for r in others if self.is_silent(r)]
        failed = [r for r in others if self.seen[r].failed == seen.status.call]
        ended = [r for r in others if self.seen[r].ended]
        if silent:
            self._silent(min(silent, key=lambda r: self.seen[r].heard_s))
        elif failed:
            self._blame(failed[0], f"failed in {_call(seen.status)}: {self.seen[failed[0]].why}")
        elif now >= seen.since_s + GRACE_S:
            if ended:
                self._blame(ended[0], f"has ended, {self._words(ended[0])}")
                return
            late = [r for r in others if self.seen[r].status.call < seen.status.call
                    or self.seen[r].status.state is State.OUT]  # fmt: skip
            self._missing(rank, late)

    def _missing(self, rank: int, late: list[int]) -> None:
        """A rank waited too long, and all others live."""
        seen = self.seen[rank]
        silent = [r for r in late if self.is_silent(r)]
        if silent:
            self._silent(silent[0])
        elif late:
            told = "; ".join(f"rank {r} is {self._words(r)}" for r in late[:8])
            names = ("rank " if len(late) == 1 else "ranks ") + ", ".join(map(str, late))
            self._fail(Fault(
                tuple(late),
                f"{names} did not come to {_call(seen.status)}, where rank {rank} waits: {told}",
            ))  # fmt: skip
        else:
            told = "; ".join(f"rank {r} is {self._words(r)}" for r in range(len(self.seen))[:8])
            self._blame(
                rank,
                f"could not go on in {_call(seen.status)}: {seen.status.text}; no rank is lost: "
                f"{told}; where one is only slow, raise timeout_s of auto_parallel",
            )

    def is_silent(self, rank: int) -> bool:
        """Whether a rank's beats stay away."""
        seen = self.seen[rank]
        limit_s = min(SILENT_S, self.timeout_s / 2)
        return not seen.ended and self.clock() > seen.heard_s + limit_s

    def _silent(self, rank: int) -> None:
        seen = self.seen[rank]
        since_s = self.clock() - seen.heard_s
        self._blame(rank, silence(since_s, seen.status))

    def _words(self, rank: int) -> str:
        return self.seen[rank].status.words()

    def _blame(self, rank: int, text: str) -> None:
        self._fail(Fault((rank,), f"rank {rank} {text}"))

    def _fail(self, fault: Fault) -> None:
        if self.fault is None:
            self.fault = fault


def lost(text: str, status: Status) -> str:
    """That a rank has gone, behind its number; with the error that ended it, if it said one."""
    if text:
        return f"ended with {text}"
    return (
        "was lost: its process ended without a word (killed, or out of memory?); last heard of "
        f"{status.words()}"
    )


def silence(since_s: float, status: Status) -> str:
    """That a rank's beats stay away, behind its number."""
    return (
        f"has not been heard of for {since_s:.0f} s: it is stopped, or its machine cannot be "
        f"reached; last heard of {status.words()}"
    )


def _call(status: Status) -> str:
    return f"call {status.call}, {status.name}"
