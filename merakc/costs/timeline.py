"""The memory of one rank at every action of its Program, from live ranges.

What the executor holds, piece by piece of memory, with no approximation but those of `live_bytes`
within a graph. When the memory of a sent message is free again depends on when its receiver is
ready for it: that is taken from simulated times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from merakc.costs.head import HeadBytes
from merakc.costs.work.memory import ActionBytes, Sum, order_bytes
from merakc.costs.work.sharded import SunkGradients
from merakc.errors import ProgramError
from merakc.ir.program import LOOKAHEAD, Action, ActionKind, Event, Program, StageGraphs

Work = tuple[int, int]  # stage, micro-batch
Place = tuple[int, int, str]  # a piece of memory: stage, micro-batch and owner that made it
# The computes that make gradients of parameters.
MAKING = ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD


@dataclass(frozen=True, slots=True)
class ActionMemory:
    """Bytes alive after an action, and the most while it ran; static ones are in both."""

    action: Action
    live_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Times:
    """When the actions of a rank begin, and when its messages have left, by position, seconds."""

    start_s: Sequence[float]
    left_s: Mapping[int, float]


def rank_times(programs: Sequence[Program], events: Iterable[Event]) -> dict[int, Times]:
    """The times of every rank from simulated events, one for each action in its order.

    A message has left when it was sent and its receive was posted.
    """
    starts: dict[int, list[float]] = {p.rank: [] for p in programs}
    for event in events:
        starts[event.rank].append(event.start_s)
    posted_s: dict[tuple[int, int, object], float] = {}
    for program in programs:
        computes = [-1] * LOOKAHEAD
        for k, action in enumerate(program.actions):
            if action.kind is ActionKind.RECV:
                ready_s = starts[program.rank][computes[-LOOKAHEAD] + 1]
                posted_s[action.peer, program.rank, action.message] = ready_s
            elif action.kind.is_compute:
                computes.append(k)
    return {
        p.rank: Times(
            starts[p.rank],
            {
                k: max(starts[p.rank][k], posted_s[p.rank, a.peer, a.message])
                for k, a in enumerate(p.actions)
                if a.kind is ActionKind.SEND
            },
        )
        for p in programs
    }


def program_memory(
    program: Program,
    chunks: Mapping[int, StageGraphs],
    static_bytes: int,
    times: Times | None = None,
    sunk: Mapping[int, SunkGradients] | None = None,
    *,
    fused: bool = False,
    head: HeadBytes | None = None,
) -> tuple[ActionMemory, ...]:
    """The memory of a rank action by action; without `times` messages leave at once.

    `static_bytes` are alive all the time: parameters, buffers, constants, optimizer state. The
    gradients of a stage are counted from its first backward on, until the end of the step; those
    that are `sunk` into buckets, by stage, as these take them. With `fused` computes they are made
    anew by every micro-batch, and then added. `head` is what couples the samples on this rank.
    """
    return _Memory(program, chunks, static_bytes, times, sunk or {}, fused, head).run()


def verify_memory(rank: int, memory: Sequence[ActionMemory], capacity_bytes: int) -> None:
    """Raises `ProgramError` with the first action that needs more than the rank has."""
    for k, found in enumerate(memory):
        if found.peak_bytes > capacity_bytes:
            raise ProgramError(
                f"rank {rank}, {found.action}, action {k} of {len(memory)}: needs "
                f"{found.peak_bytes} bytes where there are {capacity_bytes}; run fewer forwards "
                "before their backwards, or recompute"
            )


@dataclass(slots=True)
class _Memory:
    """What is alive while the Program runs."""

    program: Program
    chunks: Mapping[int, StageGraphs]
    live_bytes: int
    times: Times | None
    sunk: Mapping[int, SunkGradients]
    fused: bool
    head: HeadBytes | None
    waist: set[Place] = field(default_factory=set)  # what has been handed over to the head
    leaving: list[tuple[float, Place]] = field(default_factory=list)  # a heap
    sizes: dict[Place, int] = field(default_factory=dict)
    holders: Counter[Place] = field(default_factory=Counter)
    held: dict[Work, set[Place]] = field(default_factory=dict)
    arrived: dict[Work, dict[str, Place]] = field(default_factory=dict)  # by owner in its stage
    outgoing: dict[tuple[int, int, str, bool], Place] = field(default_factory=dict)
    handed: dict[object, Place] = field(default_factory=dict)
    readers: Counter[tuple[int, int, str, bool]] = field(default_factory=Counter)
    read: set[tuple[int, int, str]] = field(default_factory=set)  # what was received for
    with_gradients: dict[int, int] = field(default_factory=dict)  # their bytes
    posted: int = 0

    def run(self) -> tuple[ActionMemory, ...]:
        actions = self.program.actions
        sums = {stage: sunk.sums for stage, sunk in self.sunk.items()}
        effects = self._effects(sums)
        self.readers = Counter(
            (a.stage, a.micro_batch, a.value, a.is_grad)
            for a in actions
            if a.kind is ActionKind.SEND
        )
        found = []
        for k, action in enumerate(actions):
            while self.times and self.leaving and self.leaving[0][0] <= self.times.start_s[k]:
                self._drop(heappop(self.leaving)[1])
            self._post_receives(k)
            peak_bytes = self.live_bytes
            if action.kind is ActionKind.SEND:
                key = action.stage, action.micro_batch, action.value, action.is_grad
                self.readers[key] -= 1
                self._send(k, action, last=not self.readers[key])
            elif action.kind is ActionKind.RECV and action.peer == self.program.rank:
                self._arrive(action, self.handed.pop(action.message))
            elif action.kind.is_compute:
                is_first = action.kind in MAKING and action.stage not in self.with_gradients
                effect = effects[k]
                peak_bytes += effect.peak_bytes
                if is_first:
                    peak_bytes += self._begin(action.stage, effect)
                self._compute(action, effect)
            elif action.kind is ActionKind.HEAD and self.head is not None:
                peak_bytes += self.head.peak_bytes
                self._couple(action.stage, self.head)
            elif action.kind is ActionKind.REDUCE and self.sunk:
                self._reduce(action.stage)
            peak_bytes = max(peak_bytes, self.live_bytes)
            found.append(ActionMemory(action, self.live_bytes, peak_bytes))
        return tuple(found)

    def _effects(self, sums: Mapping[int, Sequence[Sum]]) -> dict[int, ActionBytes]:
        """What each compute of the Program does, by its position.

        What is not scattered is there from a stage's first gradients on.
        """
        orders: dict[Work, list[int]] = {}
        starting: dict[int, int] = {}  # the micro-batch whose gradients are a stage's first
        for k, action in enumerate(self.program.actions):
            if action.kind.is_compute:
                orders.setdefault((action.stage, action.micro_batch), []).append(k)
            if action.kind in MAKING:
                starting.setdefault(action.stage, action.micro_batch)
        there = {stage: tuple(map(_there, own)) for stage, own in sums.items()}
        known: dict[tuple[int, tuple[ActionKind, ...], bool], tuple[ActionBytes, ...]] = {}
        found: dict[int, ActionBytes] = {}
        for (stage, micro_batch), positions in orders.items():
            kinds = tuple(self.program.actions[k].kind for k in positions)
            later = micro_batch != starting.get(stage)
            key = stage, kinds, later
            if key not in known:
                own = (there if later else sums).get(stage, ())
                known[key] = order_bytes(
                    self.chunks[stage], kinds, own, later=later, fused=self.fused
                )
            found |= dict(zip(positions, known[key], strict=True))
        return found

    def _post_receives(self, now: int) -> None:
        actions, computes, position = self.program.actions, 0, now
        while position < len(actions) and computes < LOOKAHEAD:
            action = actions[position]
            computes += action.kind.is_compute
            remote = action.kind is ActionKind.RECV and action.peer != self.program.rank
            if remote and position >= self.posted:
                place = (action.peer_stage, action.micro_batch, f"message {action.message}")
                self.sizes[place] = action.size_bytes
                self._take(place)
                self._arrive(action, place)
                self._drop(place)
            position += 1
        self.posted = max(self.posted, position)

    def _arrive(self, action: Action, place: Place) -> None:
        """A received value is held by its micro-batch, under the name that its stage gives it."""
        owner = f"{'tangent' if action.is_grad else 'received'} {action.value}"
        work = action.stage, action.micro_batch
        self.arrived.setdefault(work, {})[owner] = place
        self._hold(work, self.held.get(work, set()) | {place})

    def _compute(self, action: Action, effect: ActionBytes) -> None:
        work = action.stage, action.micro_batch
        arrived = self.arrived.get(work, {})

        def place(owner: str, size_bytes: int) -> Place:
            found = arrived.get(owner, (*work, owner))
            self.sizes.setdefault(found, size_bytes)
            return found

        handed_over = {place(m.owner, m.size_bytes) for m in effect.waist} - self.waist
        for own in handed_over:
            self._take(own)
        self.waist |= handed_over
        is_grad = action.kind.sends_gradients
        for value, memory in effect.sent.items():
            key = (*work, value, is_grad)
            if not self.readers[key]:
                continue
            self.outgoing[key] = place(memory.owner, memory.size_bytes)
            self._take(self.outgoing[key])
        after = {place(m.owner, m.size_bytes) for m in effect.held}
        if is_grad or action.kind is ActionKind.FORWARD:
            self.read.add((*work, "tangent" if is_grad else "received"))
        for owner, early in arrived.items():  # for a later compute of the micro-batch
            if (*work, owner.partition(" ")[0]) not in self.read:
                after.add(early)
        self._hold(work, after)

    def _couple(self, stage: int, head: HeadBytes) -> None:
        """Lets go of what micro-batches have handed over, and gives each its gradients."""
        trains = any(a.kind.sends_gradients for a in self.program.actions)
        for work in [work for work in self.held if work[0] == stage] if trains else ():
            places = self.held[work].copy()
            for name, size_bytes in head.tangents.items():
                owner = f"tangent {name}"
                place = (stage, -1, owner) if name in head.shared else (*work, owner)
                self.sizes[place] = size_bytes
                self.arrived.setdefault(work, {})[owner] = place
                places.add(place)
            self._hold(work, places)
        for place in self.waist:
            self._drop(place)
        self.waist.clear()

    def _begin(self, stage: int, first: ActionBytes) -> int:
        """Holds the gradients that a stage's first ones leave; what its buckets take beside."""
        self.with_gradients[stage] = first.gradient_bytes
        self.live_bytes += first.gradient_bytes
        if stage not in self.sunk:
            return 0
        self.live_bytes += self.sunk[stage].held_bytes
        return self.sunk[stage].scattered_bytes

    def _reduce(self, stage: int) -> None:
        """Puts the reduced gradients in the place of those that were added up."""
        self.live_bytes -= self.with_gradients.get(stage, 0)
        if stage in self.sunk:
            held = self.sunk[stage].held_bytes if stage in self.with_gradients else 0
            self.live_bytes += self.sunk[stage].reduced_bytes - held

    def _send(self, position: int, action: Action, *, last: bool) -> None:
        key = action.stage, action.micro_batch, action.value, action.is_grad
        place = self.outgoing.get(key)
        if place is None:  # the gradient is a part of the state or the batch
            place = (action.stage, action.micro_batch, f"sent {action.value}")
            self.sizes.setdefault(place, action.size_bytes)
            self._take(place)
            self.outgoing[key] = place
        if action.peer == self.program.rank:
            self.handed[action.message] = place
            self._hold_handed(action, place)
        elif self.times is not None:
            self._take(place)
            heappush(self.leaving, (self.times.left_s[position], place))
        if last:
            self._drop(self.outgoing.pop(key))

    def _hold_handed(self, action: Action, place: Place) -> None:
        """What is on its way between two stages of the rank is held by the one that will read."""
        work = action.peer_stage, action.micro_batch
        self._hold(work, self.held.get(work, set()) | {place})

    def _hold(self, work: Work, places: set[Place]) -> None:
        before = self.held.get(work, set())
        self.held[work] = places
        for place in places - before:
            self._take(place)
        for place in before - places:
            self._drop(place)

    def _take(self, place: Place) -> None:
        self.live_bytes += 0 if self.holders[place] else self.sizes[place]
        self.holders[place] += 1

    def _drop(self, place: Place) -> None:
        self.holders[place] -= 1
        self.live_bytes -= 0 if self.holders[place] else self.sizes[place]


def _there(found: Sum) -> Sum:
    """A sum as a later micro-batch finds it."""
    return found if found.is_scattered else replace(found, size_bytes=0)
