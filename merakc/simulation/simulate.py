"""The simulator: checks the Programs of a step, then runs them with costs in place of kernels.

There is no queue of events in time order here: each rank runs as far as it can
(`merakc.simulation.faults`).
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from merakc.costs.streams import Streams
from merakc.ir.costs import CostTable, GraphCollectives, StageCost
from merakc.ir.program import (
    Action,
    ActionKind,
    CollectiveEvent,
    CollectiveKind,
    Event,
    Mesh,
    Program,
)
from merakc.simulation.collective_faults import verify_collectives
from merakc.simulation.contention import GATHERING, stretched
from merakc.simulation.faults import Channel, Work, run_programs, trains, verify_programs


@dataclass(frozen=True, slots=True)
class MemorySample:
    """The bytes alive on a rank at a moment, what an action allocates at its start included."""

    rank: int
    time_s: float
    live_bytes: int


@dataclass(frozen=True, slots=True)
class Simulation:
    """One simulated step. `busy_s` and `peak_bytes` are per rank, in the order of the Programs.

    Busy is computing or reducing, or waiting for collectives over dp: that is the exposed part of
    their seconds. `bubble_share` is the idle part of ranks times `step_s`. A `RECV` event lasts as
    long as the rank waits, a `SEND` event, which takes the rank no time, stands at the moment of
    posting. `collectives` are the events of those over dp, which run beside the others, `inside`
    those of the computes' graphs. `memory` holds samples, rank by rank in order of time. Computes
    take `stretch` times as long as on ranks that are alone.
    """

    step_s: float
    events: tuple[Event, ...]
    busy_s: tuple[float, ...]
    bubble_share: float
    peak_bytes: tuple[int, ...]
    memory: tuple[MemorySample, ...] = ()
    exposed_s: tuple[float, ...] = ()
    communication_s: tuple[float, ...] = ()
    collectives: tuple[Event, ...] = ()
    inside: GraphCollectives = field(default_factory=dict, hash=False)
    stretch: float = 1.0

    def collectives_inside(self, ranks: Collection[int]) -> tuple[CollectiveEvent, ...]:
        """The collectives of the computes of some ranks: there may be very many."""
        events = [e for e in self.events if e.rank in ranks and e.kind.is_compute]
        numbers = [tuple(map(int, e.label.split(e.kind))) for e in events]
        again = {
            (e.rank, *number)
            for e, number in zip(events, numbers, strict=True)
            if e.kind is ActionKind.RECOMPUTE
        }
        found = []
        for e, number in zip(events, numbers, strict=True):
            recomputed = e.kind is ActionKind.FORWARD and (e.rank, *number) in again
            for own in self.inside.get((number[0], e.kind, recomputed), ()):
                shares = own.start, own.start, own.end, own.wait_start, own.wait_end
                times_s = (e.start_s + share * (e.end_s - e.start_s) for share in shares)
                found.append(CollectiveEvent(e.rank, own.op, own.axis, own.size_bytes, *times_s))
        return tuple(found)


def simulate(
    programs: Sequence[Program],
    costs: CostTable,
    head: int | None = None,
    mesh: Mesh | None = None,
) -> Simulation:
    """The times, the waits and the peak memory of one step. Verifies the Programs first:
    what couples samples is on the stage `head`, or where they have it; dp ranks are those of the
    `mesh`, where it is known.

    A stage's costs are those of `costs.stages[action.stage]`. The messages of an ordered pair of
    ranks share one link: each takes size / `p2p_bytes_per_s` of it, after the one before, and
    arrives `p2p_latency_s` later. The collectives over dp that an action holds run beside the
    computing, one after the other. A reduction takes `reduce_s` once they all have ended, and waits
    for no other rank.

    A message of a rank to itself takes no time, and memory only at the receiving stage.

    Live bytes of a rank: static ones; what a micro-batch saves, from its forward to the end of
    its backward, of which a recomputed one's forward leaves the checkpoint alone and a weight
    gradient holds the deferred ones; a received activation until its forward has run, which from
    then on counts among the saved; a received gradient until its backward has ended; a sent
    message until it has arrived; what couples the samples reads of a micro-batch until that has
    run, and then its gradient until the micro-batch's backward has ended. An action's own peak
    stands on top.

    Raises `ProgramError` as `verify_programs` and `verify_collectives` do.
    """
    verify_programs(programs, head=head)
    verify_collectives(programs, mesh)
    training = trains(programs)
    durations, stretch = _durations(programs, costs)
    states = {
        p.rank: _Rank(p.rank, costs, _static_bytes(p, costs), training, _recomputed(p), iter(own))
        for p, own in zip(programs, durations.values(), strict=True)
    }
    link_free_s: dict[tuple[int, int], float] = {}
    arrivals_s: dict[Channel, deque[float]] = defaultdict(deque)

    def post(rank: int, action: Action) -> None:
        pair, state = (rank, action.peer), states[rank]
        if action.peer == rank:
            arrivals_s[rank, rank, action.is_grad].append(state.clock.now_s)
            state.hand_over(action)
            return
        start_s = max(state.clock.now_s, link_free_s.get(pair, 0.0))
        link_free_s[pair] = start_s + action.size_bytes / costs.p2p_bytes_per_s
        arrival_s = link_free_s[pair] + costs.p2p_latency_s
        arrivals_s[rank, action.peer, action.is_grad].append(arrival_s)
        state.send(action, arrival_s)

    def receive(rank: int, action: Action) -> None:
        states[rank].receive(action, arrivals_s[action.peer, rank, action.is_grad].popleft())

    stuck = run_programs(programs, post, receive, lambda rank, a: states[rank].compute(a))
    assert not stuck, "verified programs ran into a deadlock"
    return replace(_result(list(states.values()), costs), stretch=stretch)


def _result(states: Sequence[_Rank], costs: CostTable) -> Simulation:
    step_s = max((s.clock.now_s for s in states), default=0.0)
    busy_s = tuple(s.busy_s for s in states)
    total_s = len(states) * step_s
    return Simulation(
        step_s=step_s,
        events=tuple(e for s in states for e in s.events),
        busy_s=busy_s,
        bubble_share=1.0 - sum(busy_s) / total_s if total_s else 0.0,
        peak_bytes=tuple(s.peak_bytes for s in states),
        memory=tuple(m for s in states for m in s.memory),
        exposed_s=tuple(s.clock.exposed_s for s in states),
        communication_s=tuple(s.clock.posted_s for s in states),
        collectives=tuple(e for s in states for e in s.collectives()),
        inside=costs.collectives,
    )


@dataclass(slots=True)
class _Rank:
    """The clock and the memory of one rank while it runs."""

    rank: int
    costs: CostTable
    live_bytes: int
    training: bool
    recomputed: frozenset[Work]
    durations: Iterator[float]
    clock: Streams = field(init=False)
    busy_s: float = 0.0
    peak_bytes: int = field(init=False)
    events: list[Event] = field(default_factory=list)
    memory: list[MemorySample] = field(default_factory=list)
    in_flight: list[tuple[float, int]] = field(default_factory=list)  # heap of (arrival, bytes)
    received_bytes: Counter[tuple[int, int, bool]] = field(default_factory=Counter)
    waist: Counter[int] = field(default_factory=Counter)  # what stages have handed over

    def __post_init__(self) -> None:
        self.peak_bytes = self.live_bytes
        self.clock = Streams(self.costs.overlap)

    def hand_over(self, action: Action) -> None:
        self._note(action, self.clock.now_s)

    def send(self, action: Action, arrival_s: float) -> None:
        heapq.heappush(self.in_flight, (arrival_s, action.size_bytes))
        self.live_bytes += action.size_bytes
        self._touch()
        self._note(action, self.clock.now_s)

    def receive(self, action: Action, arrival_s: float) -> None:
        self.received_bytes[action.stage, action.micro_batch, action.is_grad] += action.size_bytes
        self.live_bytes += action.size_bytes
        self._touch()
        start_s = self.clock.now_s
        self.clock.idle(max(0.0, arrival_s - start_s))
        self._note(action, start_s)

    def compute(self, action: Action) -> None:
        cost, kind = self.costs.stages[action.stage], action.kind
        work = action.stage, action.micro_batch
        again = work in self.recomputed
        match kind:
            case ActionKind.FORWARD:
                self._touch(cost.checkpoint_peak_bytes if again else cost.forward_peak_bytes)
                kept_bytes = cost.checkpoint_bytes if again else cost.saved_bytes
                self.live_bytes += kept_bytes if self.training else 0
                self.live_bytes -= self.received_bytes.pop((*work, False), 0)
                self.live_bytes += cost.waist_bytes
                self.waist[action.stage] += 1
            case ActionKind.HEAD:
                self._touch(cost.head_peak_bytes)
                left_bytes = cost.tangent_bytes if self.training else 0
                self.live_bytes += self.waist[action.stage] * (left_bytes - cost.waist_bytes)
            case ActionKind.RECOMPUTE:
                self._touch(cost.recompute_peak_bytes)
                self.live_bytes += cost.saved_bytes - cost.checkpoint_bytes
            case ActionKind.BACKWARD | ActionKind.INPUT_GRAD:
                self._touch(cost.backward_peak_bytes)
                deferred_bytes = cost.deferred_bytes if kind is ActionKind.INPUT_GRAD else 0
                self.live_bytes += deferred_bytes - cost.saved_bytes - cost.tangent_bytes
                self.live_bytes -= self.received_bytes.pop((*work, True), 0)
            case ActionKind.WEIGHT_GRAD:
                self._touch(cost.weight_peak_bytes)
                self.live_bytes -= cost.deferred_bytes
            case ActionKind.REDUCE:
                self.live_bytes += cost.reduced_bytes
                self._touch()
        start_s = self.clock.now_s
        duration_s = next(self.durations)
        if action.collectives or self.clock.queue:
            self._run(action, duration_s)
        else:
            self.clock.compute(duration_s)
        self.busy_s += self.clock.now_s - start_s
        self._note(action, start_s)

    def _run(self, action: Action, duration_s: float) -> None:
        """Computes, and starts and waits for collectives on the way."""
        clock, done = self.clock, 0.0
        for collective in action.collectives:
            clock.compute(duration_s * (collective.share - done))
            done = collective.share
            if collective.kind is CollectiveKind.WAIT:
                for kind in GATHERING:
                    clock.wait((collective.bucket, kind))
            else:
                key = collective.bucket, collective.kind
                clock.post(key, self.costs.collective_s[key])
        if action.kind is ActionKind.REDUCE:
            clock.wait_all()
        clock.compute(duration_s * (1.0 - done))

    def collectives(self) -> Iterator[Event]:
        """The collectives over dp, with their times."""
        for (bucket, kind), start_s, end_s in self.clock.ended:
            of = ActionKind.GATHER if kind in GATHERING else ActionKind.REDUCE
            yield Event(self.rank, f"{kind} {bucket}", of, start_s, end_s)

    def _note(self, action: Action, start_s: float) -> None:
        if action.kind.is_compute:
            self.memory.append(MemorySample(self.rank, self.clock.now_s, self.live_bytes))
        self.events.append(Event(self.rank, str(action), action.kind, start_s, self.clock.now_s))

    def _touch(self, extra_bytes: int = 0) -> None:
        """Notes the peak. Messages only leave between sends, so an action peaks at its start."""
        while self.in_flight and self.in_flight[0][0] <= self.clock.now_s:
            self.live_bytes -= heapq.heappop(self.in_flight)[1]
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + extra_bytes)
        self.memory.append(MemorySample(self.rank, self.clock.now_s, self.live_bytes + extra_bytes))


def _duration_s(cost: StageCost, kind: ActionKind) -> float:
    match kind:
        case ActionKind.FORWARD:
            return cost.forward_s
        case ActionKind.BACKWARD:
            return cost.backward_s
        case ActionKind.INPUT_GRAD:
            return cost.input_grad_s
        case ActionKind.WEIGHT_GRAD:
            return cost.weight_grad_s
        case ActionKind.RECOMPUTE:
            return cost.recompute_s
        case ActionKind.HEAD:
            return cost.head_s
        case ActionKind.GATHER:
            return 0.0
        case ActionKind.REDUCE:
            return cost.reduce_s
        case _:
            raise AssertionError(f"{kind} is a message, it has no duration of its own")


def _durations(
    programs: Sequence[Program], costs: CostTable
) -> tuple[dict[int, list[float]], float]:
    """The seconds of each rank's computes, reductions and gathers, in their order, and how many
    times those of ranks that are alone they are.
    """

    def alone_s(action: Action) -> float:
        return _duration_s(costs.stages[action.stage], action.kind)

    alone = {p.rank: [alone_s(a) for a in p.actions if not a.kind.is_message] for p in programs}
    if costs.sharing is None:
        return alone, 1.0
    found = stretched(programs, costs, alone_s, costs.sharing, costs.ranks)
    whole_s, before_s = (sum(map(sum, own.values())) for own in (found, alone))
    return found, whole_s / before_s if before_s else 1.0


def _static_bytes(program: Program, costs: CostTable) -> int:
    stages = {a.stage for a in program.actions}
    return sum(costs.stages[s].static_bytes for s in stages)


def _recomputed(program: Program) -> frozenset[Work]:
    """What the rank runs forward once more."""
    again = (a for a in program.actions if a.kind is ActionKind.RECOMPUTE)
    return frozenset((a.stage, a.micro_batch) for a in again)
