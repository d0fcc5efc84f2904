"""The simulator: checks the Programs of a step, then runs them with costs in place of kernels.

There is no queue of events in time order here: each rank runs as far as it can
(`merakc.simulation.faults`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from merakc.costs.streams import Streams, Times
from merakc.ir.costs import CostTable, GraphCollectives, StageCost
from merakc.ir.program import COMPUTES, Action, ActionKind, CollectiveEvent, Event, Mesh, Program
from merakc.simulation.collective_faults import verify_collectives
from merakc.simulation.contention import stretched
from merakc.simulation.faults import Work, run_programs, trains, verify_programs
from merakc.simulation.held import Held, Peak
from merakc.simulation.links import Links, Message
from merakc.simulation.parts import GATHERING, Compute, parts_of
from merakc.simulation.steady import LeftOut, Pace, left_out_seconds


@dataclass(frozen=True, slots=True)
class MemorySample:
    """The bytes alive on a rank at a moment, what an action allocates at its start included."""

    rank: int
    time_s: float
    live_bytes: int


@dataclass(frozen=True, slots=True)
class Simulation:
    """One simulated step. `busy_s` and `peaks` are per rank, in the order of the Programs. `step_s`
    is that of the Programs alone: what a call does around them is in a `Prediction`'s.

    Busy is computing or reducing, or waiting for collectives over dp: that is the exposed part of
    their seconds. `bubble_share` is the idle part of ranks times `step_s`. A `RECV` event lasts as
    long as the rank waits, a `SEND` event, which takes the rank no time, stands at the moment of
    posting. `messages` are those between two ranks, in the order in which each receives them.
    `collectives` are the events of those over dp, which run beside the others, and `waits` when
    their rank stands still for them, inside its computes; `inside` are those of the computes'
    graphs. `memory` holds samples, rank by rank in order of time. Computes take
    `stretch` times as long as on ranks that are alone. `host_bytes` is the most that each rank has
    on its host.
    """

    step_s: float
    events: tuple[Event, ...]
    busy_s: tuple[float, ...]
    bubble_share: float
    peaks: tuple[Peak, ...]
    memory: tuple[MemorySample, ...] = ()
    exposed_s: tuple[float, ...] = ()
    communication_s: tuple[float, ...] = ()
    messages: tuple[Message, ...] = ()
    collectives: tuple[Event, ...] = ()
    waits: tuple[Event, ...] = ()
    inside: GraphCollectives = field(default_factory=dict, hash=False)
    stretch: float = 1.0
    host_bytes: tuple[int, ...] = ()

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """The most that each rank holds."""
        return tuple(peak.total_bytes for peak in self.peaks)

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
    *,
    verified: bool = False,
    traced: bool = True,
    left_out: LeftOut | None = None,
) -> Simulation:
    """The times, the waits and the peak memory of one step. Verifies the Programs first, unless
    they are `verified`: what couples samples is on the stage `head`, or where they have it; dp
    ranks are those of the `mesh`, where it is known. Unless `traced`, no events, messages and
    samples of memory are kept. With periods that are `left_out`, the Programs are those of a step
    without them, and seconds those of the whole step; it is not to be traced.

    A stage's costs are those of `costs.stages[action.stage]`. Messages take what `Links` says. The
    collectives over dp that an action holds run beside the computing, one after the other. A
    reduction takes `reduce_s` once they all have ended, and waits for no other rank. What ranks
    hold is what `Held` says.

    Raises `ProgramError` as `verify_programs` and `verify_collectives` do, and `UnsteadyError`
    where what is left out is not as what there is.
    """
    assert left_out is None or not traced, "what is left out has no events"
    if not verified:
        verify_programs(programs, head=head)
        verify_collectives(programs, mesh)
    training = trains(programs)
    durations, stretch = _durations(programs, costs)
    links = Links(costs.link)
    states = {
        p.rank: _Rank(
            p.rank, costs, links, _held(p, costs, training, traced), iter(durations[p.rank]),
            traced, pace=None if left_out is None else Pace.of(p, left_out),
        )
        for p in programs
    }  # fmt: skip
    stuck = run_programs(
        programs,
        lambda rank, a: states[rank].send(a),
        lambda rank, a: states[rank].receive(a),
        lambda rank, a: states[rank].compute(a),
    )
    assert not stuck, "verified programs ran into a deadlock"
    return _result(list(states.values()), costs, stretch)


def _result(states: Sequence[_Rank], costs: CostTable, stretch: float) -> Simulation:
    paces = [s.pace for s in states if s.pace is not None]
    for state, more in zip(states, left_out_seconds(paces) if paces else (), strict=False):
        state.clock.now_s += more.now_s
        state.clock.exposed_s += more.exposed_s
        state.clock.posted_s += more.posted_s
        state.busy_s += more.busy_s
    step_s = max((s.clock.now_s for s in states), default=0.0)
    busy_s = tuple(s.busy_s for s in states)
    total_s = len(states) * step_s
    return Simulation(
        step_s=step_s,
        events=tuple(e for s in states for e in s.events),
        busy_s=busy_s,
        bubble_share=max(0.0, 1.0 - sum(busy_s) / total_s) if total_s else 0.0,  # but for rounding
        peaks=tuple(s.held.peak for s in states),
        memory=tuple(MemorySample(s.rank, *sample) for s in states for sample in s.held.samples),
        exposed_s=tuple(s.clock.exposed_s for s in states),
        communication_s=tuple(s.clock.posted_s for s in states),
        messages=tuple(m for s in states for m in s.messages),
        collectives=tuple(e for s in states for e in s.over_dp(s.clock.ended)),
        waits=tuple(e for s in states for e in s.over_dp(s.clock.waits)),
        inside=costs.collectives,
        stretch=stretch,
        host_bytes=tuple(s.held.host_peak_bytes for s in states),
    )


@dataclass(slots=True)
class _Rank:
    """The clock and the memory of one rank while it runs."""

    rank: int
    costs: CostTable
    links: Links
    held: Held
    durations: Iterator[float]
    traced: bool
    pace: Pace | None = None
    clock: Streams = field(init=False)
    busy_s: float = 0.0
    events: list[Event] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock = Streams(self.costs.overlap, self.traced)

    def send(self, action: Action) -> None:
        now_s = self.clock.now_s
        message = self.links.post(self.rank, action, now_s)
        if action.peer != self.rank:
            self.held.send(action, now_s, message.arrives_s)
        self._note(action, now_s)

    def receive(self, action: Action) -> None:
        start_s, message = self.clock.now_s, self.links.coming(self.rank, action).popleft()
        self.held.receive(action, start_s)
        if self.pace is not None:
            self.pace.arrived(message.arrives_s)
        self.clock.idle(max(0.0, message.arrives_s - start_s))
        if self.traced and action.peer != self.rank:
            waited_s = max(0.0, self.clock.now_s - max(start_s, message.sent_s))
            self.messages.append(replace(message, exposed_s=waited_s))
        self._note(action, start_s)

    def compute(self, action: Action) -> None:
        start_s, waits = self.clock.now_s, len(self.clock.waits)
        self.held.start(action, start_s)
        for part in parts_of(action, next(self.durations), self.costs, self.clock):
            if isinstance(part, Compute):
                self.clock.compute(part.left_s)
        self.busy_s += self.clock.now_s - start_s
        if action.kind.is_compute:
            self.held.sample(self.clock.now_s)
            if self.pace is not None:
                self.pace.note(action.kind, self.clock, self.busy_s, self.held.activations_bytes)
        else:  # a reduction is nothing else
            del self.clock.waits[waits:]
        self._note(action, start_s)

    def over_dp(self, times: Sequence[Times]) -> Iterator[Event]:
        """What collectives over dp, by their keys, take from when to when."""
        for (bucket, kind), start_s, end_s in times:
            of = ActionKind.GATHER if kind in GATHERING else ActionKind.REDUCE
            yield Event(self.rank, f"{kind} {bucket}", of, start_s, end_s)

    def _note(self, action: Action, start_s: float) -> None:
        if self.traced:
            end_s = self.clock.now_s
            self.events.append(Event(self.rank, str(action), action.kind, start_s, end_s))


def _held(program: Program, costs: CostTable, training: bool, traced: bool) -> Held:
    """What a rank holds before its first action."""
    stages = {a.stage for a in program.actions}
    again = (a for a in program.actions if a.kind is ActionKind.RECOMPUTE)
    recomputed = frozenset[Work]((a.stage, a.micro_batch) for a in again)
    static_bytes = sum(costs.stages[s].static_bytes for s in stages)
    return Held(costs.stages, static_bytes, training, recomputed, traced)


def _duration_s(cost: StageCost, kind: ActionKind) -> float:
    match kind:
        case ActionKind.HEAD:
            return cost.head_s
        case ActionKind.GATHER:
            return 0.0
        case ActionKind.REDUCE:
            return cost.reduce_s
        case _:
            return cost.effects[COMPUTES.index(kind)].seconds


def _durations(
    programs: Sequence[Program], costs: CostTable
) -> tuple[dict[int, list[float]], float]:
    """The seconds of each rank's computes, reductions and gathers, in their order, and how many
    times those of ranks that are alone they are.
    """
    seconds = cache(lambda stage, kind: _duration_s(costs.stages[stage], kind))

    def alone_s(action: Action) -> float:
        return seconds(action.stage, action.kind)

    alone = {p.rank: [alone_s(a) for a in p.actions if not a.kind.is_message] for p in programs}
    if costs.sharing is None:
        return alone, 1.0
    found = stretched(programs, costs, alone_s, costs.sharing, costs.ranks)
    whole_s, before_s = (sum(map(sum, own.values())) for own in (found, alone))
    return found, whole_s / before_s if before_s else 1.0
