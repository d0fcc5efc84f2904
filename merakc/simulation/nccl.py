"""The proof that the calls of a step on communicators come to their end on GPUs.

The model is the strictest that NCCL may be, and the host: a call ends only when all its ranks have
come to it; a host waits for its computing wherever it may; collectives of a rank run one after the
other, whatever their communicators, as they do where multiprocessors are scarce; and what is first
called on a communicator that is not connected yet holds its host up until all have called it. Less
of any of these lets calls begin earlier and changes no order, so that what ends here always ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from merakc.analysis.calls import (
    Call,
    Communicator,
    Event,
    Join,
    Stream,
    Sync,
    Wait,
    Wiring,
    step_calls,
)
from merakc.errors import ProgramError
from merakc.ir.program import Program
from merakc.simulation.faults import deadlock

# How communicators connect: with their group, or when ranks first meet.
Connecting = Literal["eager", "lazy"]
Queue = tuple[object, ...]


def verify_calls(programs: Sequence[Program], wiring: Wiring) -> None:
    """Checks that no ranks of a step wait for each other on GPUs, and that those of a communicator
    make the same calls in the same order.

    Ranks whose Programs are not given are taken to do as theirs do. Raises `ProgramError`, which
    names two ranks, their calls and the actions.
    """
    run_calls({p.rank: step_calls(p, wiring) for p in programs})


def run_calls(
    scripts: Mapping[int, Sequence[Event]],
    connecting: Connecting = "eager",
    opened: Callable[[Communicator], bool] = lambda _: True,
) -> None:
    """Runs what each rank does, as far as it comes; with `connecting` "lazy" communicators that are
    not `opened` before the step connect in it. Raises as `verify_calls` does.
    """
    ranks = {rank: _Rank(rank, events) for rank, events in scripts.items()}
    model = _Model(ranks, connecting == "lazy", opened)
    ready = deque(ranks)
    while ready:
        ready.extend(model.advance(ranks[ready.popleft()]))
    stuck = {rank.number: model.reason(rank) for rank in ranks.values() if not rank.is_done}
    if stuck:
        for peer, text in stuck.values():
            if peer not in stuck:
                raise ProgramError(f"{text}, and rank {peer} ends its step without it")
        raise deadlock(stuck)


@dataclass(slots=True, eq=False)
class _Queue:
    """A stream, or the calls of a queue: what a host has given it, and how far it is."""

    given: list[Wait | tuple[Stream, int]] = field(default_factory=list)
    at: int = 0


@dataclass(slots=True, eq=False)
class _Rank:
    """One rank while it runs."""

    number: int
    events: Sequence[Event]
    at: int = 0  # of the host
    streams: dict[Stream, _Queue] = field(
        default_factory=lambda: {stream: _Queue() for stream in Stream}
    )
    queues: dict[Queue, deque[Call]] = field(default_factory=dict)
    begins: dict[Call, int] = field(default_factory=dict)  # where in its stream a call can begin
    ended: set[Call] = field(default_factory=set)

    @property
    def is_done(self) -> bool:
        """Whether its step has ended."""
        idle = all(stream.at == len(stream.given) for stream in self.streams.values())
        return self.at == len(self.events) and idle and not any(self.queues.values())

    def has_begun(self, call: Call) -> bool:
        """Whether a call's stream has come to it."""
        return self.streams[call.stream].at >= self.begins[call]

    def next_event(self) -> Event | None:
        """What the host does next."""
        return self.events[self.at] if self.at < len(self.events) else None


class _Model:
    """The ranks of a step and what joins them."""

    def __init__(
        self, ranks: Mapping[int, _Rank], lazy: bool, opened: Callable[[Communicator], bool]
    ) -> None:
        self.ranks, self.lazy, self.opened = ranks, lazy, opened
        self.met: dict[tuple[Communicator, tuple[int, ...]], set[int]] = {}

    def advance(self, rank: _Rank) -> Collection[int]:
        """Runs one rank as far as it comes; the others that may go on for that."""
        woken: set[int] = set()
        moved = True
        while moved:
            moved = self._host(rank, woken)
            for stream in rank.streams.values():
                moved |= self._stream(rank, stream)
            for key, calls in rank.queues.items():
                moved |= bool(calls) and self._queue(rank, key, woken)
        return woken

    def _host(self, rank: _Rank, woken: set[int]) -> bool:
        start = rank.at
        while (event := rank.next_event()) is not None:
            match event:
                case Call():
                    if not self._connects(rank, event, woken):
                        break
                    rank.begins[event] = len(rank.streams[event.stream].given)
                    rank.queues.setdefault(self._key(event), deque()).append(event)
                case Wait():
                    rank.streams[event.stream].given.append(event)
                case Join():
                    there = len(rank.streams[event.other].given)
                    rank.streams[event.stream].given.append((event.other, there))
                case Sync():
                    stream = rank.streams[Stream.COMPUTE]
                    if stream.at < len(stream.given):
                        break
            rank.at += 1
        return rank.at > start

    def _connects(self, rank: _Rank, call: Call, woken: set[int]) -> bool:
        """Whether the host goes on behind a call: what it calls is connected."""
        if not self.lazy or self.opened(call.communicator):
            return True
        met = self.met.setdefault((call.communicator, tuple(sorted(call.ends))), set())
        if rank.number not in met:
            met.add(rank.number)
            woken |= set(self._members(call))
        return met >= set(self._members(call))

    def _key(self, call: Call) -> Queue:
        """What runs one after the other: collectives, and the messages of a communicator; of more
        ranks than two it has a connection for each pair where they connect lazily.
        """
        if not call.is_message:
            return ()
        return (call.communicator, *(sorted(call.ends) if self.lazy else ()))

    def _members(self, call: Call) -> list[int]:
        return [r for r in call.ends if r in self.ranks]

    def _stream(self, rank: _Rank, stream: _Queue) -> bool:
        start = stream.at
        while stream.at < len(stream.given):
            item = stream.given[stream.at]
            if isinstance(item, Wait):
                if item.call not in rank.ended:
                    break
            elif rank.streams[item[0]].at < item[1]:
                break
            stream.at += 1
        return stream.at > start

    def _queue(self, rank: _Rank, key: Queue, woken: set[int]) -> bool:
        """Ends the calls at the head of a queue that all their ranks have begun."""
        moved = False
        calls = rank.queues[key]
        while calls and rank.has_begun(calls[0]):
            call = calls[0]
            members = self._members(call)
            if not all(self._comes(rank.number, call, other) for other in members):
                break
            for member in members:
                own = self.ranks[member]
                own.ended.add(own.queues[key].popleft())
            woken.update(m for m in members if m != rank.number)
            moved = True
        return moved

    def _comes(self, rank: int, call: Call, other: int) -> bool:
        """Whether another rank has come to the same call. Refuses one that it is to make before,
        and that joins the two as well.
        """
        calls = self.ranks[other].queues.get(self._key(call))
        if not calls:
            return False
        head = calls[0]
        if (head.communicator, head.what) == (call.communicator, call.what):
            return self.ranks[other].has_begun(head)
        if rank in head.ends and other in head.ends:
            raise ProgramError(
                f"rank {rank} calls for {call}, while rank {other} calls for {head}; ranks must "
                "call in one order for what they do together"
            )
        return False

    def reason(self, rank: _Rank) -> tuple[int, str]:
        """Another rank for which this one waits, and what for."""
        event = rank.next_event()
        if isinstance(event, Call):
            call, met = event, self.met[event.communicator, tuple(sorted(event.ends))]
            peer = next(r for r in self._members(call) if r not in met)
        else:
            call = self._blocking(rank)
            others = (r for r in self._members(call) if r != rank.number)
            peer = next(r for r in others if not self._comes(rank.number, call, r))
        return peer, f"rank {rank.number} waits for {call}"

    def _blocking(self, rank: _Rank) -> Call:
        """The call that a rank has begun and cannot end, for which its computing waits."""
        stream = next((x for x in rank.streams.values() if x.at < len(x.given)), None)
        while stream is not None:
            item = stream.given[stream.at]
            if not isinstance(item, Wait):
                stream = rank.streams[item[0]]
                continue
            head = rank.queues[self._key(item.call)][0]
            if rank.has_begun(head):
                return head
            stream = rank.streams[head.stream]
        return next(calls[0] for calls in rank.queues.values() if calls)
