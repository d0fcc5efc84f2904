"""How long computes take where ranks share cores, so that one slows another down.

Ranks are run together, from one event to the next: between two of them, all ranks of a node that
compute have the same share of their speed (processor sharing: Kleinrock, JACM 14(2), 1967). The
simulator then runs each rank by itself, with the durations that are found here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from merakc.costs.streams import Streams
from merakc.ir.costs import CostTable
from merakc.ir.program import Action, ActionKind, Program
from merakc.machines.cluster import Sharing
from merakc.simulation.links import Links
from merakc.simulation.parts import Compute, Wait, parts_of

Seconds = Callable[[Action], float]
# Where no rank has anything to do, a rank waits for a message that nobody sends: the Programs are
# verified before.
_DONE = math.inf


@dataclass(slots=True)
class _Receive:
    """A rank stands still for a message."""

    rank: int
    action: Action


@dataclass(slots=True)
class _Rank:
    """A rank on its way, and what it does now; None once it has ended."""

    node: int
    clock: Streams
    way: Iterator[Compute | Wait | _Receive]
    now: Compute | Wait | _Receive | None = None
    durations_s: list[float] = field(default_factory=list)


def stretched(
    programs: Sequence[Program], costs: CostTable, seconds: Seconds, sharing: Sharing, ranks: int
) -> dict[int, list[float]]:
    """The seconds of each compute, reduction and gather of each rank, in their order.

    `seconds` are what one takes alone. Without what it waits for of collectives over dp. Where the
    Programs are those of fewer than the `ranks` that there are, each stands for as many.
    """
    return _Together(programs, costs, seconds, sharing, ranks).run()


class _Together:
    """All ranks, and the messages between them."""

    def __init__(
        self,
        programs: Sequence[Program],
        costs: CostTable,
        seconds: Seconds,
        sharing: Sharing,
        ranks: int,
    ) -> None:
        self.costs, self.seconds, self.sharing = costs, seconds, sharing
        self.now_s = 0.0
        self.is_short = sharing.is_short(max(ranks, len(programs)))
        self.links = Links(costs.link)
        self.ranks: dict[int, _Rank] = {}
        for program in programs:
            rank = _Rank(
                program.rank // sharing.devices, Streams(costs.overlap, traced=False), iter(())
            )
            rank.way = self._way(program, rank)
            self.ranks[program.rank] = rank
        here = Counter(rank.node for rank in self.ranks.values())
        all_of = Counter(k // sharing.devices for k in range(max(ranks, len(programs))))
        self.stands_for = {node: max(all_of[node] / count, 1.0) for node, count in here.items()}

    def run(self) -> dict[int, list[float]]:
        """Runs all ranks to their ends."""
        for rank in self.ranks.values():
            rank.now = next(rank.way, None)
        while any(rank.now is not None for rank in self.ranks.values()):
            speeds = self._speeds()
            step_s = min(self._steady(rank, speeds) for rank in self.ranks.values())
            assert step_s < _DONE, "verified programs ran into a deadlock"
            self.now_s += step_s
            for rank in self.ranks.values():
                self._pass(rank, step_s, speeds)
            for rank in self.ranks.values():
                while rank.now is not None and self._until(rank, speeds) <= 0:
                    self._end(rank)
        return {number: rank.durations_s for number, rank in self.ranks.items()}

    def _speeds(self) -> Mapping[int, float]:
        """Of the ranks of each node that compute now."""
        busy = Counter(r.node for r in self.ranks.values() if self._takes_a_core(r))
        return {
            node: self.sharing.speed(count * self.stands_for[node]) for node, count in busy.items()
        }

    def _takes_a_core(self, rank: _Rank) -> bool:
        """For computes and, where cores are short, for what it sends and receives over dp."""
        communicates = self.is_short and rank.now is not None and bool(rank.clock.queue)
        return isinstance(rank.now, Compute) or communicates

    def _until(self, rank: _Rank, speeds: Mapping[int, float]) -> float:
        """Seconds until what a rank does now has ended, if all goes on like this."""
        match rank.now:
            case Compute(left_s) | Wait(left_s):
                return left_s / self._speed(rank, speeds)
            case _Receive(number, action) if coming := self.links.coming(number, action):
                return max(coming[0].arrives_s - self.now_s, 0.0)
            case _:
                return _DONE

    def _speed(self, rank: _Rank, speeds: Mapping[int, float]) -> float:
        return speeds.get(rank.node, 1.0) if self._takes_a_core(rank) else 1.0

    def _steady(self, rank: _Rank, speeds: Mapping[int, float]) -> float:
        """Seconds in which a rank neither ends what it does nor gives its core back."""
        until_s = self._until(rank, speeds)
        if isinstance(rank.now, Compute) or not self._takes_a_core(rank):
            return until_s
        return min(until_s, rank.clock.left_s() / self._speed(rank, speeds))

    def _pass(self, rank: _Rank, step_s: float, speeds: Mapping[int, float]) -> None:
        speed = self._speed(rank, speeds)
        if isinstance(rank.now, Compute | Wait):
            ends = self._until(rank, speeds) <= step_s
            rank.now.left_s = 0.0 if ends else rank.now.left_s - step_s * speed
        if isinstance(rank.now, Compute):
            rank.durations_s[-1] += step_s
            rank.clock.compute(step_s)
        elif step_s >= rank.clock.left_s() / speed:
            rank.clock.wait()
        else:
            rank.clock.idle(step_s * speed)

    def _end(self, rank: _Rank) -> None:
        if isinstance(rank.now, _Receive):
            self.links.coming(rank.now.rank, rank.now.action).popleft()
        rank.now = next(rank.way, None)

    def _way(self, program: Program, rank: _Rank) -> Iterator[Compute | Wait | _Receive]:
        """What a rank does, one thing after the other."""
        for action in program.actions:
            if action.kind is ActionKind.SEND:
                self.links.post(program.rank, action, self.now_s)
            elif action.kind is ActionKind.RECV:
                yield _Receive(program.rank, action)
            else:
                rank.durations_s.append(0.0)
                yield from parts_of(action, self.seconds(action), self.costs, rank.clock)
