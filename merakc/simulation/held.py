"""The bytes that a rank holds along its actions, by what they are, and the most at once."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from merakc.ir.costs import Effect, StageCost
from merakc.ir.program import COMPUTES, Action, ActionKind
from merakc.simulation.faults import Work

_ENDS = (ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD)


@dataclass(frozen=True, slots=True)
class Peak:
    """What a rank holds at its highest point, at the start of `action`.

    Static bytes are there all along; activations are those of the micro-batches `in_flight`, which
    have run forward and not backward; transient ones the action's own. `reduced_bytes` is what
    gradients take more once they are reduced.
    """

    action: str = "before the first action"
    in_flight: int = 0
    static_bytes: int = 0
    activations_bytes: int = 0
    messages_bytes: int = 0
    reduced_bytes: int = 0
    transient_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All of it."""
        live_bytes = self.static_bytes + self.activations_bytes + self.messages_bytes
        return live_bytes + self.reduced_bytes + self.transient_bytes


@dataclass(slots=True)
class Held:
    """What a rank holds while it runs.

    Static bytes; what a micro-batch saves, from its forward to the end of its backward, of which a
    recomputed one's forward leaves the checkpoint alone and a weight gradient holds the deferred
    ones; a received activation until its forward has run, which from then on counts among the
    saved; a received gradient until its backward has ended; a sent message until it has arrived;
    what couples the samples reads of a micro-batch until that has run, and then its gradient until
    the micro-batch's backward has ended. An action's own peak stands on top.

    `samples` are the bytes alive at moments, an action's own at its start included, where it is
    `traced`. `host_peak_bytes` is the most that was on the host at once.
    """

    costs: Sequence[StageCost]
    static_bytes: int
    training: bool
    recomputed: frozenset[Work]
    traced: bool = True
    activations_bytes: int = 0
    messages_bytes: int = 0
    reduced_bytes: int = 0
    host_bytes: int = 0
    host_peak_bytes: int = 0
    peak: Peak = field(init=False)
    samples: list[tuple[float, int]] = field(default_factory=list)
    leaving: list[tuple[float, int]] = field(default_factory=list)  # heap of (arrival, bytes)
    received: Counter[tuple[int, int, bool]] = field(default_factory=Counter)
    waist: Counter[int] = field(default_factory=Counter)  # micro-batches that have handed it over
    in_flight: set[Work] = field(default_factory=set)
    effects: dict[int, tuple[Effect, ...]] = field(default_factory=dict)  # by stage

    def __post_init__(self) -> None:
        self.peak = Peak(static_bytes=self.static_bytes)

    @property
    def live_bytes(self) -> int:
        """All that is held now."""
        moving = self.activations_bytes + self.messages_bytes + self.reduced_bytes
        return self.static_bytes + moving

    def send(self, action: Action, now_s: float, arrives_s: float) -> None:
        """Holds a message until it arrives at another rank."""
        heapq.heappush(self.leaving, (arrives_s, action.size_bytes))
        self.messages_bytes += action.size_bytes
        self._touch(action, now_s)

    def receive(self, action: Action, now_s: float) -> None:
        """Holds the buffer of a message."""
        self.received[action.stage, action.micro_batch, action.is_grad] += action.size_bytes
        self.messages_bytes += action.size_bytes
        self._touch(action, now_s)

    def start(self, action: Action, now_s: float) -> None:
        """What an action that is no message takes as it starts, and has left when it ends."""
        cost = self.costs[action.stage]
        match action.kind:
            case ActionKind.HEAD:
                self._touch(action, now_s, cost.head_peak_bytes)
                tangent_bytes = cost.tangent_bytes if self.training else 0
                handed_over = self.waist[action.stage]
                self.activations_bytes += handed_over * (tangent_bytes - cost.waist_bytes)
            case ActionKind.REDUCE:
                self.reduced_bytes += cost.reduced_bytes
                self._touch(action, now_s)
            case kind if kind.is_compute:
                self._compute(action, now_s, cost)

    def sample(self, now_s: float) -> None:
        """Notes what is held."""
        if self.traced:
            self.samples.append((now_s, self.live_bytes))

    def _compute(self, action: Action, now_s: float, cost: StageCost) -> None:
        kind, work = action.kind, (action.stage, action.micro_batch)
        is_forward = kind is ActionKind.FORWARD
        is_short = is_forward and work in self.recomputed
        if action.stage not in self.effects:
            self.effects[action.stage] = cost.effects
        effect = self.effects[action.stage][-1 if is_short else COMPUTES.index(kind)]
        self._touch(action, now_s, effect.peak_bytes)
        self.activations_bytes += effect.left_bytes if self.training else 0
        if is_forward:
            self.activations_bytes += cost.waist_bytes
            self.waist[action.stage] += 1
        if kind.sends_gradients:
            self.activations_bytes -= cost.tangent_bytes
        if is_forward and self.training:
            self.in_flight.add(work)
        if kind in _ENDS:
            self.in_flight.discard(work)
        self._move(kind, cost)
        if is_forward or kind.sends_gradients:
            self.messages_bytes -= self.received.pop((*work, kind.sends_gradients), 0)

    def _move(self, kind: ActionKind, cost: StageCost) -> None:
        """What a compute leaves on the host, or takes from there."""
        match kind:
            case ActionKind.FORWARD if self.training:
                self.host_bytes += cost.host_bytes
            case ActionKind.BACKWARD:
                self.host_bytes -= cost.host_bytes
            case ActionKind.INPUT_GRAD:
                self.host_bytes -= cost.host_bytes - cost.deferred_host_bytes
            case ActionKind.WEIGHT_GRAD:
                self.host_bytes -= cost.deferred_host_bytes
            case _:
                pass
        self.host_peak_bytes = max(self.host_peak_bytes, self.host_bytes)

    def _touch(self, action: Action, now_s: float, own_bytes: int = 0) -> None:
        """Notes the peak. Messages only leave between sends, so an action peaks at its start."""
        while self.leaving and self.leaving[0][0] <= now_s:
            self.messages_bytes -= heapq.heappop(self.leaving)[1]
        now_bytes = self.live_bytes + own_bytes
        if self.traced:
            self.samples.append((now_s, now_bytes))
        if now_bytes > self.peak.total_bytes:
            self.peak = Peak(
                str(action), len(self.in_flight), self.static_bytes,
                activations_bytes=self.activations_bytes, messages_bytes=self.messages_bytes,
                reduced_bytes=self.reduced_bytes, transient_bytes=own_bytes,
            )  # fmt: skip
