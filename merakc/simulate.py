"""The simulator: checks the Programs of a step, then runs them with costs in place of kernels.

A rank runs its actions in order. A send is posted and forgotten; a receive waits. That makes the
ranks a network of processes that are joined by queues alone, whose result does not depend on who
runs first (Kahn 1974). So there is no queue of events in time order here: each rank runs as far
as it can, and a rank that waits is woken by the send that it waits for.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from merakc.errors import ProgramError
from merakc.ir.costs import CostTable, StageCost
from merakc.ir.program import Action, ActionKind, Event, Program

_GRADIENT_KINDS = (ActionKind.BACKWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD)


@dataclass(frozen=True, slots=True)
class Simulation:
    """One simulated step. `busy_s` and `peak_bytes` are per rank, in the order of the Programs.

    Busy is computing or reducing; `bubble_share` is the idle part of ranks times `step_s`. A
    `RECV` event lasts as long as the rank waits, a `SEND` event, which takes the rank no time,
    stands at the moment of posting.
    """

    step_s: float
    events: tuple[Event, ...]
    busy_s: tuple[float, ...]
    bubble_share: float
    peak_bytes: tuple[int, ...]


def verify_programs(programs: Sequence[Program]) -> None:
    """Checks that the Programs of all ranks run to their end together and miss no work.

    Every send has one receive at its peer and the other way round, in the same order per ordered
    pair of ranks; no ranks wait for each other in a circle, sends being buffered; every stage runs
    each micro-batch forward once and, unless nothing in the step runs backward, backward once
    after that, whole or as input and weight gradients; gradients are reduced after the last of
    them. That a message arrives before the compute that reads it is the caller's affair.

    Raises `ProgramError`, which names the rank and the action.
    """
    ranks = Counter(p.rank for p in programs)
    for rank, count in ranks.items():
        if count > 1:
            raise ProgramError(f"rank {rank} has {count} programs; it needs exactly one")
    _verify_messages(programs)
    _verify_progress(programs)
    _verify_compute(programs)


def simulate(programs: Sequence[Program], costs: CostTable) -> Simulation:
    """The times, the waits and the peak memory of one step. Verifies the Programs first.

    A stage's costs are those of `costs.stages[action.stage]`. The messages of an ordered pair of
    ranks share one link: each takes size / `p2p_bytes_per_s` of it, after the one before, and
    arrives `p2p_latency_s` later. A reduction takes `reduce_s` and waits for nobody.

    Live bytes of a rank: static ones; what a micro-batch saves, from its forward to the end of
    its backward or weight gradient; a received activation until its forward has run, which from
    then on counts among the saved; a received gradient until its backward has ended; a sent
    message until it has arrived. An action's own peak stands on top.

    Raises `ProgramError` as `verify_programs` does.
    """
    verify_programs(programs)
    trains = _trains(programs)
    states = {p.rank: _Rank(p.rank, costs, _static_bytes(p, costs), trains) for p in programs}
    link_free_s: dict[tuple[int, int], float] = {}
    arrivals_s: dict[tuple[int, int], deque[float]] = defaultdict(deque)

    def post(rank: int, action: Action) -> None:
        pair, state = (rank, action.peer), states[rank]
        start_s = max(state.now_s, link_free_s.get(pair, 0.0))
        link_free_s[pair] = start_s + action.size_bytes / costs.p2p_bytes_per_s
        arrival_s = link_free_s[pair] + costs.p2p_latency_s
        arrivals_s[pair].append(arrival_s)
        state.send(action, arrival_s)

    def receive(rank: int, action: Action) -> None:
        states[rank].receive(action, arrivals_s[action.peer, rank].popleft())

    def compute(rank: int, action: Action) -> None:
        states[rank].compute(action)

    stuck = _run(programs, post, receive, compute)
    assert not stuck, "verified programs ran into a deadlock"
    step_s = max((s.now_s for s in states.values()), default=0.0)
    busy_s = tuple(s.busy_s for s in states.values())
    total_s = len(states) * step_s
    return Simulation(
        step_s=step_s,
        events=tuple(e for s in states.values() for e in s.events),
        busy_s=busy_s,
        bubble_share=1.0 - sum(busy_s) / total_s if total_s else 0.0,
        peak_bytes=tuple(s.peak_bytes for s in states.values()),
    )


@dataclass(slots=True)
class _Rank:
    """The clock and the memory of one rank while it runs."""

    rank: int
    costs: CostTable
    live_bytes: int
    trains: bool
    now_s: float = 0.0
    busy_s: float = 0.0
    peak_bytes: int = field(init=False)
    events: list[Event] = field(default_factory=list)
    in_flight: list[tuple[float, int]] = field(default_factory=list)  # heap of (arrival, bytes)
    received_bytes: Counter[tuple[int, int, bool]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.peak_bytes = self.live_bytes

    def send(self, action: Action, arrival_s: float) -> None:
        heapq.heappush(self.in_flight, (arrival_s, action.size_bytes))
        self.live_bytes += action.size_bytes
        self._touch()
        self._advance(action, 0.0)

    def receive(self, action: Action, arrival_s: float) -> None:
        self.received_bytes[action.stage, action.micro_batch, action.is_grad] += action.size_bytes
        self.live_bytes += action.size_bytes
        self._touch()
        self._advance(action, max(0.0, arrival_s - self.now_s))

    def compute(self, action: Action) -> None:
        cost, kind = self.costs.stages[action.stage], action.kind
        work = action.stage, action.micro_batch
        saved_bytes = cost.saved_bytes if self.trains else 0
        if kind is ActionKind.FORWARD:
            self._touch(cost.forward_peak_bytes)
            self.live_bytes += saved_bytes - self.received_bytes.pop((*work, False), 0)
        elif kind in _GRADIENT_KINDS:
            self._touch(cost.backward_peak_bytes)
            if kind is not ActionKind.INPUT_GRAD:
                self.live_bytes -= saved_bytes + self.received_bytes.pop((*work, True), 0)
        duration_s = _duration_s(cost, kind)
        self.busy_s += duration_s
        self._advance(action, duration_s)

    def _advance(self, action: Action, duration_s: float) -> None:
        start_s, self.now_s = self.now_s, self.now_s + duration_s
        self.events.append(Event(self.rank, str(action), action.kind, start_s, self.now_s))

    def _touch(self, extra_bytes: int = 0) -> None:
        """Notes the peak. Messages only leave between sends, so an action peaks at its start."""
        while self.in_flight and self.in_flight[0][0] <= self.now_s:
            self.live_bytes -= heapq.heappop(self.in_flight)[1]
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + extra_bytes)


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
        case ActionKind.REDUCE:
            return cost.reduce_s
        case _:
            raise AssertionError(f"{kind} is a message, it has no duration of its own")


def _static_bytes(program: Program, costs: CostTable) -> int:
    stages = {a.stage for a in program.actions}
    return sum(costs.stages[s].static_bytes for s in stages)


def _trains(programs: Iterable[Program]) -> bool:
    kinds = {a.kind for p in programs for a in p.actions}
    return not kinds.isdisjoint((*_GRADIENT_KINDS, ActionKind.REDUCE))


def _run(
    programs: Sequence[Program],
    post: Callable[[int, Action], None],
    receive: Callable[[int, Action], None],
    compute: Callable[[int, Action], None],
) -> dict[int, Action]:
    """Runs every rank as far as it comes; returns the receive at which each stuck one waits."""
    actions = {p.rank: p.actions for p in programs}
    position = dict.fromkeys(actions, 0)
    posted: Counter[tuple[int, int]] = Counter()
    waiting: dict[int, Action] = {}
    ready = deque(actions)
    while ready:
        rank = ready.popleft()
        mine = actions[rank]
        while position[rank] < len(mine):
            action = mine[position[rank]]
            if action.kind is ActionKind.RECV:
                if not posted[action.peer, rank]:
                    waiting[rank] = action
                    break
                posted[action.peer, rank] -= 1
                receive(rank, action)
            elif action.kind is ActionKind.SEND:
                post(rank, action)
                posted[rank, action.peer] += 1
                if action.peer in waiting and waiting[action.peer].peer == rank:
                    del waiting[action.peer]
                    ready.append(action.peer)
            else:
                compute(rank, action)
            position[rank] += 1
    return waiting


def _verify_messages(programs: Sequence[Program]) -> None:
    ranks = {p.rank for p in programs}
    sends: dict[tuple[int, int], list[Action]] = defaultdict(list)
    receives: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for program in programs:
        for action in program.actions:
            if action.kind not in (ActionKind.SEND, ActionKind.RECV):
                continue
            if action.peer not in ranks or action.peer == program.rank:
                raise ProgramError(
                    f"rank {program.rank}, {action}: rank {action.peer} is no peer; "
                    f"the programs are of ranks {sorted(ranks)}"
                )
            if action.kind is ActionKind.SEND:
                sends[program.rank, action.peer].append(action)
            else:
                receives[action.peer, program.rank].append(action)
    for pair in sends.keys() | receives.keys():
        _verify_pair(*pair, sends[pair], receives[pair])


def _verify_pair(
    source: int, target: int, sends: Sequence[Action], receives: Sequence[Action]
) -> None:
    sent = Counter(a.message for a in sends)
    received = Counter(a.message for a in receives)
    for rank, peer, mine, others, twin in (
        (source, target, sends, received, "receive"),
        (target, source, receives, sent, "send"),
    ):
        left = Counter(others)
        for action in mine:
            left[action.message] -= 1
            if left[action.message] < 0:
                raise ProgramError(f"rank {rank}, {action}: rank {peer} has no matching {twin}")
    for k, (send, recv) in enumerate(zip_longest(sends, receives)):
        if send.message != recv.message:
            raise ProgramError(
                f"rank {source}, {send}: message {k} from rank {source} to rank {target}, where "
                f"rank {target} expects '{recv}'; both must post in the same order"
            )
        if send.size_bytes != recv.size_bytes:
            raise ProgramError(
                f"rank {source}, {send}: sends {send.size_bytes} bytes, but rank {target}, "
                f"{recv} expects {recv.size_bytes}"
            )


def _ignore(rank: int, action: Action) -> None:
    del rank, action


def _verify_progress(programs: Sequence[Program]) -> None:
    waiting = _run(programs, _ignore, _ignore, _ignore)
    if not waiting:
        return
    # Every receive has its send, so each stuck rank waits for another stuck one.
    cycle = [min(waiting)]
    while (peer := waiting[cycle[-1]].peer) not in cycle:
        cycle.append(peer)
    cycle = cycle[cycle.index(peer) :]
    circle = "; ".join(f"rank {r} waits at '{waiting[r]}'" for r in cycle)
    raise ProgramError(f"deadlock, each rank waits for the next: {circle}")


def _verify_compute(programs: Sequence[Program]) -> None:
    trains = _trains(programs)
    actions = [a for p in programs for a in p.actions]
    reduces = any(a.kind is ActionKind.REDUCE for a in actions)
    forwards = [a.micro_batch for a in actions if a.kind is ActionKind.FORWARD]
    micro_batches = 1 + max(forwards, default=-1)
    for program in programs:
        done = _verify_rank(program)
        for stage in dict.fromkeys(a.stage for a in program.actions):
            if reduces and Action(ActionKind.REDUCE, stage) not in program.actions:
                raise ProgramError(f"rank {program.rank}, reduce {stage}: is missing")
            for j in range(micro_batches):
                kinds = done[stage, j]
                if ActionKind.FORWARD not in kinds:
                    raise ProgramError(f"rank {program.rank}, {stage}F{j}: is missing")
                if trains and not _is_differentiated(kinds):
                    kind = ActionKind.WEIGHT_GRAD if len(kinds) > 1 else ActionKind.BACKWARD
                    raise ProgramError(f"rank {program.rank}, {stage}{kind}{j}: is missing")


def _is_differentiated(kinds: set[ActionKind]) -> bool:
    return ActionKind.BACKWARD in kinds or ActionKind.WEIGHT_GRAD in kinds


def _verify_rank(program: Program) -> dict[tuple[int, int], set[ActionKind]]:
    """Checks the order of the compute of one rank; returns what it did per stage, micro-batch."""
    done: dict[tuple[int, int], set[ActionKind]] = defaultdict(set)
    reduced: set[int] = set()
    for action in program.actions:
        if action.kind in (ActionKind.SEND, ActionKind.RECV):
            continue
        if action.stage in reduced:
            raise ProgramError(
                f"rank {program.rank}, {action}: stands after the reduction of its stage"
            )
        if action.kind is ActionKind.REDUCE:
            reduced.add(action.stage)
            continue
        kinds = done[action.stage, action.micro_batch]
        if fault := _fault(action.kind, kinds):
            raise ProgramError(f"rank {program.rank}, {action}: {fault}")
        kinds.add(action.kind)
    return done


def _fault(kind: ActionKind, before: set[ActionKind]) -> str:
    """What is wrong with this compute of a micro-batch after the ones before it, if anything."""
    if kind in before:
        return "runs a second time"
    if kind is not ActionKind.FORWARD and ActionKind.FORWARD not in before:
        return "stands before its forward"
    if kind is ActionKind.WEIGHT_GRAD and ActionKind.INPUT_GRAD not in before:
        return "stands before its input gradient"
    if kind is ActionKind.INPUT_GRAD and ActionKind.BACKWARD in before:
        return "its gradients are made by its backward already"
    if kind is ActionKind.BACKWARD and ActionKind.INPUT_GRAD in before:
        return "its gradients are made by its input and weight gradients already"
    return ""
