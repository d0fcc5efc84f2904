"""What the memory of each rank holds at its peak, from the simulated step walked again."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from merakc.costs.work.sharded import graph_state_bytes
from merakc.ir.costs import StageCost
from merakc.ir.graph import InputKind
from merakc.ir.program import Action, ActionKind, Event, Program
from merakc.ir.report import RankMemory
from merakc.lowering.lowered import Lowered

# A rank's actions with their simulated times.
Steps = Mapping[int, Sequence[tuple[Action, Event]]]


@dataclass(frozen=True, slots=True)
class Link:
    """What joins two ranks of the pipeline: seconds of a message of n bytes are
    `latency_s` + n / `bytes_per_s`, behind the one before.
    """

    latency_s: float
    bytes_per_s: float


def steps_of(programs: Sequence[Program], events: Sequence[Event]) -> Steps:
    """Each action with its event; simulated events are in the order of each rank's Program.

    What starts collectives over dp at the head of a step takes no time, and is left out.
    """
    own: dict[int, list[Event]] = {p.rank: [] for p in programs}
    for event in events:
        if event.kind is not ActionKind.GATHER:
            own[event.rank].append(event)
    return {p.rank: list(zip(p.actions, own[p.rank], strict=True)) for p in programs}


def arrivals(steps: Sequence[tuple[Action, Event]], link: Link) -> Iterator[tuple[Action, float]]:
    """The messages that a rank sends to others, and when they arrive."""
    free_s: dict[int, float] = {}
    for action, event in steps:
        if action.kind is ActionKind.SEND and action.peer != event.rank:
            start_s = max(event.start_s, free_s.get(action.peer, 0.0))
            free_s[action.peer] = start_s + action.size_bytes / link.bytes_per_s
            yield action, free_s[action.peer] + link.latency_s


def rank_memory(
    lowered: Lowered, costs: Sequence[StageCost], steps: Steps, link: Link
) -> tuple[RankMemory, ...]:
    """The parts of every rank's peak, by the rules and in the order of the simulator."""
    found = []
    for place, (rank, own) in enumerate(steps.items()):
        stages = [s for s, holder in enumerate(lowered.plan.rank_of) if holder == place]
        walk = _Walk(rank, costs, _static(lowered, costs, stages), own, link)
        found.append(walk.run(place))
    return tuple(found)


def _static(lowered: Lowered, costs: Sequence[StageCost], stages: Sequence[int]) -> dict[str, int]:
    """What is there all along, by the fields of `RankMemory`."""
    plan, total = lowered.plan, Counter[str]()
    for stage in stages:
        graph = lowered.stages.local[stage]
        state = graph_state_bytes(graph, plan.shards(stage), plan.precision)
        frozen_bytes = 0
        if plan.shards(stage).parameters == 1:  # those are in no bucket
            own = (i for i in graph.inputs if i.kind is InputKind.PARAMETER)
            frozen_bytes = sum(i.spec.size_bytes for i in own if not i.requires_grad)
        parts = {
            "parameters_bytes": state.parameter_bytes + frozen_bytes,
            "gathered_bytes": state.gathered_bytes,
            "gradients_bytes": state.summed_bytes + state.filling_bytes,
            "optimizer_bytes": state.kept_bytes - state.parameter_bytes,
        }
        rest = costs[stage].static_bytes - sum(parts.values())
        total.update({**parts, "buffers_bytes": rest})
    return dict(total)


@dataclass(slots=True)
class _Walk:
    """The memory of one rank along its actions."""

    rank: int
    costs: Sequence[StageCost]
    static: dict[str, int]
    steps: Sequence[tuple[Action, Event]]
    link: Link
    saved: Counter[tuple[int, int]] = field(default_factory=Counter)  # by stage and micro-batch
    received: Counter[tuple[int, int, bool]] = field(default_factory=Counter)
    leaving: list[tuple[float, int]] = field(default_factory=list)  # a heap of messages
    totals: Counter[str] = field(default_factory=Counter)
    flying: set[tuple[int, int]] = field(default_factory=set)
    best: RankMemory | None = None

    def run(self, place: int) -> RankMemory:
        """The parts at the peak; `place` is the rank's in the pipeline."""
        training = any(a.kind.sends_gradients for a, _ in self.steps)
        again = {(a.stage, a.micro_batch) for a, _ in self.steps if a.kind is ActionKind.RECOMPUTE}
        arriving = arrivals(self.steps, self.link)
        self._touch(place, "before the first action")
        for action, event in self.steps:
            match action.kind:
                case ActionKind.SEND:
                    if action.peer != self.rank:
                        heapq.heappush(self.leaving, (next(arriving)[1], action.size_bytes))
                        self._hold("messages_bytes", action.size_bytes)
                        self._touch(place, str(action), event.start_s)
                case ActionKind.RECV:
                    key = action.stage, action.micro_batch, action.is_grad
                    self.received[key] += action.size_bytes
                    self._hold("messages_bytes", action.size_bytes)
                    self._touch(place, str(action), event.start_s)
                case ActionKind.REDUCE:
                    self._hold("gradients_bytes", self.costs[action.stage].reduced_bytes)
                    self._touch(place, str(action), event.start_s)
                case ActionKind.HEAD:
                    self._couple(place, action, event, training)
                case _:
                    is_again = (action.stage, action.micro_batch) in again
                    self._compute(place, action, event, is_again, training)
        assert self.best is not None
        return self.best

    def _compute(
        self, place: int, action: Action, event: Event, is_again: bool, training: bool
    ) -> None:
        cost, work = self.costs[action.stage], (action.stage, action.micro_batch)
        match action.kind:
            case ActionKind.FORWARD:
                peak_bytes = cost.checkpoint_peak_bytes if is_again else cost.forward_peak_bytes
                left_bytes = cost.checkpoint_bytes if is_again else cost.saved_bytes
                left_bytes = cost.waist_bytes + (left_bytes if training else 0)
            case ActionKind.RECOMPUTE:
                peak_bytes = cost.recompute_peak_bytes
                left_bytes = cost.saved_bytes + cost.tangent_bytes
            case ActionKind.INPUT_GRAD:
                peak_bytes, left_bytes = cost.backward_peak_bytes, cost.deferred_bytes
            case ActionKind.BACKWARD:
                peak_bytes, left_bytes = cost.backward_peak_bytes, 0
            case _:
                peak_bytes, left_bytes = cost.weight_peak_bytes, 0
        self._touch(place, str(action), event.start_s, peak_bytes)
        self._hold("activations_bytes", left_bytes - self.saved[work])
        self.saved[work] = left_bytes
        if action.kind is ActionKind.FORWARD and training:
            self.flying.add(work)
        if action.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD):
            self.flying.discard(work)
        if action.kind is ActionKind.FORWARD or action.kind.sends_gradients:
            key = (*work, action.kind.sends_gradients)
            self._hold("messages_bytes", -self.received.pop(key, 0))

    def _couple(self, place: int, action: Action, event: Event, training: bool) -> None:
        """What micro-batches have handed over goes, and the gradients that they get come."""
        cost = self.costs[action.stage]
        self._touch(place, str(action), event.start_s, cost.head_peak_bytes)
        more_bytes = (cost.tangent_bytes if training else 0) - cost.waist_bytes
        for work in self.saved:
            if work[0] == action.stage:
                self.saved[work] += more_bytes
                self._hold("activations_bytes", more_bytes)

    def _hold(self, part: str, size_bytes: int) -> None:
        self.totals[part] += size_bytes

    def _touch(self, place: int, action: str, now_s: float = 0.0, extra_bytes: int = 0) -> None:
        while self.leaving and self.leaving[0][0] <= now_s:
            self._hold("messages_bytes", -heapq.heappop(self.leaving)[1])
        now_bytes = sum(self.static.values()) + sum(self.totals.values()) + extra_bytes
        if self.best is not None and now_bytes <= self.best.peak_bytes:
            return
        parts = Counter(self.static)
        parts.update(self.totals)
        fields = ("parameters", "gathered", "gradients", "optimizer", "buffers", "activations",
                  "messages")  # fmt: skip
        own = {f"{name}_bytes": parts[f"{name}_bytes"] for name in fields}
        self.best = RankMemory(place, action, len(self.flying), **own, transient_bytes=extra_bytes)
