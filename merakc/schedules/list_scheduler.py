"""List scheduling of a pipeline under a cap of each rank's memory.

Time runs forward; a rank that is idle takes the most urgent work that is ready and fits: gradients
first, since other ranks wait for them, then forwards, then what fills gaps, weight gradients and
recomputations. A forward is admitted as in the banker's algorithm (Dijkstra 1965): only if all
micro-batches that the rank has begun could still be finished, one after the other, oldest first.
As every rank finishes them in the same order, the pipeline cannot lock up for want of memory.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import inf

from merakc.schedules.timing import Pipeline
from merakc.schedules.work import BACKWARD, FORWARD, INPUT_GRAD, RECOMPUTE, WEIGHT_GRAD, Work


@dataclass(frozen=True, slots=True)
class Rules:
    """How a rank chooses among what is ready.

    `deepest_first`: of several forwards, that of the latest stage; `oldest_first`: of several
    gradients, that of the lowest micro-batch, else of the latest stage. More than `max_pending`
    weight gradients go before forwards. Gaps shorter than `patience` of the work that would
    fill them are left open when a gradient is about to come. `max_in_flight` of each stage bounds
    its begun micro-batches. After a `burst` of micro-batches one more may enter the pipeline every
    `pace_s`: forwards that come no faster than gradients return hold memory for a shorter time.
    """

    split: bool = True
    deepest_first: bool = True
    oldest_first: bool = True
    max_pending: float = inf
    patience: float = 0.0
    max_in_flight: tuple[int, ...] = ()
    burst: int = 1
    pace_s: float = 0.0


def list_schedule(
    pipeline: Pipeline,
    capacity_bytes: Sequence[float],
    rules: Rules,
    recomputed: Collection[int] = (),
) -> list[list[Work]] | None:
    """The orders of all ranks, or None where a rank cannot hold even one micro-batch, or, where
    backwards wait for all forwards, cannot hold all.

    `recomputed` are the units whose forward keeps a checkpoint alone.
    """
    return _Scheduler(pipeline, capacity_bytes, rules, recomputed).run()


@dataclass(slots=True)
class _Rank:
    """A rank's stages, first to last, what it holds, and what it has done."""

    stages: tuple[int, ...]
    capacity_bytes: float  # for what is kept between actions
    one_bytes: int  # that a micro-batch keeps on all of its stages, at the most
    free_s: float = 0.0
    live_bytes: float = 0.0
    pending_bytes: float = 0.0  # of live ones, those that weight gradients will free
    pending: deque[int] = field(default_factory=deque)  # units without their weight gradient
    order: list[Work] = field(default_factory=list)


class _Scheduler:
    """The state of all ranks while time runs."""

    def __init__(
        self,
        pipeline: Pipeline,
        capacity_bytes: Sequence[float],
        rules: Rules,
        recomputed: Collection[int],
    ) -> None:
        p, m, costs = pipeline, pipeline.micro_batches, pipeline.costs
        self.m, self.last, self.rules, self.costs = m, p.stages - 1, rules, costs
        self.head_s, self.effects = p.head_s, p.effects
        self.rank_of, self.link_s, self.seconds = p.rank_of, p.link_s, p.seconds
        self.recomputed, self.remade = recomputed, set[int]()
        self.kept = [c.saved_bytes for c in costs]
        self.checkpoint = [c.checkpoint_bytes for c in costs]
        self.deferred = [c.deferred_bytes if rules.split else 0 for c in costs]
        self.forwards = [0] * p.stages  # micro-batches run so far, by stage
        self.gradients = [0] * p.stages
        self.input_s = [[inf] * m for _ in range(p.stages)]  # arrivals, once known
        self.gradient_s = [[inf] * m for _ in range(p.stages)]
        self.input_s[0] = [max(0, j + 1 - rules.burst) * rules.pace_s for j in range(m)]
        self.in_flight = rules.max_in_flight or (m,) * p.stages
        self.ranks = []
        for rank in range(p.ranks):
            own = tuple(s for s in range(p.stages) if p.rank_of[s] == rank)
            one_bytes = sum(max(self.kept[s], self.checkpoint[s]) for s in own)
            free_bytes = capacity_bytes[rank] - self._overhead_bytes(own)
            self.ranks.append(_Rank(own, free_bytes, one_bytes))
        self.events = [(0.0, rank) for rank in range(p.ranks)]
        self.events += [(when_s, p.rank_of[0]) for when_s in self.input_s[0] if when_s > 0.0]
        heapq.heapify(self.events)

    def _overhead_bytes(self, stages: Sequence[int]) -> int:
        """What a rank holds beside what it keeps: static bytes, and the most of an action's own."""
        own = 0
        again = {unit // self.m for unit in self.recomputed}
        for stage in stages:
            cost, checkpoint = self.costs[stage], self.checkpoint[stage]
            own = max(own, cost.backward_peak_bytes)
            if self.rules.split:
                more_bytes = max(self.effects[stage][INPUT_GRAD].left_bytes, 0)
                own = max(own, cost.input_grad_peak_bytes - more_bytes, cost.weight_peak_bytes)
            own = max(own, cost.forward_peak_bytes - cost.saved_bytes)
            if stage in again:
                own = max(own, cost.checkpoint_peak_bytes - checkpoint)
                own = max(own, cost.recompute_peak_bytes - cost.saved_bytes + checkpoint)
        return own + sum(self.costs[s].static_bytes for s in stages)

    def run(self) -> list[list[Work]] | None:
        """Runs until nothing is left to do."""
        while self.events:
            now, number = heapq.heappop(self.events)
            rank = self.ranks[number]
            if rank.free_s > now:
                continue  # it looks again when it is free
            work = self._choose(rank, now)
            if work is not None:
                self._do(number, work, now)
        done = min(self.gradients) == self.m and not any(r.pending for r in self.ranks)
        return [r.order for r in self.ranks] if done else None

    def _choose(self, rank: _Rank, now: float) -> Work | None:
        ready, soon_s = self._ready_gradients(rank, now)
        for _, stage in ready:
            if (work := self._gradient(rank, stage)) is not None:
                return work
        pending = bool(rank.pending)
        if len(rank.pending) <= self.rules.max_pending:
            forward = self._forward(rank, now)
            if forward is not None:
                return forward
        patience = self.rules.patience
        if pending:
            unit = rank.pending[0]
            if ready or soon_s - now >= patience * self.seconds[WEIGHT_GRAD][unit // self.m]:
                return WEIGHT_GRAD, unit
        if len(rank.pending) > self.rules.max_pending and (f := self._forward(rank, now)):
            return f
        return self._early_recomputation(rank, now, soon_s)

    def _ready_gradients(
        self, rank: _Rank, now: float
    ) -> tuple[list[tuple[tuple[int, int], int]], float]:
        """Stages whose next gradient has come, most urgent first; when the next one comes."""
        ready = []
        soon_s = inf
        for stage in rank.stages:
            j = self.gradients[stage]
            if j >= self.forwards[stage]:
                continue
            came_s = self.gradient_s[stage][j]
            if came_s <= now:
                key = (j, -stage) if self.rules.oldest_first else (-stage, j)
                ready.append((key, stage))
            elif came_s < soon_s:
                soon_s = came_s
        ready.sort()
        return ready, soon_s

    def _gradient(self, rank: _Rank, stage: int) -> Work | None:
        """The next gradient of a stage, or the recomputation before it, or what makes room; where
        none is made for what waits for a weight gradient, both gradients at once.
        """
        unit = stage * self.m + self.gradients[stage]
        if unit not in self.recomputed or unit in self.remade:
            more_bytes = self.effects[stage][INPUT_GRAD].left_bytes
            if not self.rules.split:
                return BACKWARD, unit
            if rank.live_bytes + more_bytes <= rank.capacity_bytes:
                return INPUT_GRAD, unit
            return (WEIGHT_GRAD, rank.pending[0]) if rank.pending else (BACKWARD, unit)
        more_bytes = self.kept[stage] - self.checkpoint[stage]
        if rank.live_bytes + more_bytes <= rank.capacity_bytes:
            if self._is_safe(rank, more_bytes, remade=unit):
                return RECOMPUTE, unit
        elif rank.pending:
            return WEIGHT_GRAD, rank.pending[0]
        return None

    def _forward(self, rank: _Rank, now: float) -> Work | None:
        """The next forward that has its input and fits, or the weight gradient that makes room."""
        stages = reversed(rank.stages) if self.rules.deepest_first else rank.stages
        for stage in stages:
            j = self.forwards[stage]
            if j >= self.m or self.input_s[stage][j] > now:
                continue
            if j - self.gradients[stage] >= self.in_flight[stage]:
                continue
            unit = stage * self.m + j
            more_bytes = self._forward_bytes(unit)
            if not self._is_safe(rank, more_bytes, forwarded=stage):
                continue
            if rank.live_bytes + more_bytes <= rank.capacity_bytes:
                return FORWARD, unit
            if rank.pending:
                return WEIGHT_GRAD, rank.pending[0]
        return None

    def _early_recomputation(self, rank: _Rank, now: float, soon_s: float) -> Work | None:
        """The recomputation whose gradient is needed next, if the rank has nothing else to do."""
        for stage in reversed(rank.stages):
            j = self.gradients[stage]
            unit = stage * self.m + j
            if j >= self.forwards[stage] or unit not in self.recomputed or unit in self.remade:
                continue
            more_bytes = self.kept[stage] - self.checkpoint[stage]
            if rank.live_bytes + more_bytes > rank.capacity_bytes:
                continue
            own = self.gradient_s[stage][j] == soon_s
            if not own and soon_s - now < self.rules.patience * self.seconds[RECOMPUTE][stage]:
                continue
            if self._is_safe(rank, more_bytes, remade=unit):
                return RECOMPUTE, unit
        return None

    def _forward_bytes(self, unit: int) -> int:
        stage = unit // self.m
        return self.checkpoint[stage] if unit in self.recomputed else self.kept[stage]

    def _is_safe(
        self, rank: _Rank, more_bytes: float, forwarded: int = -1, remade: int = -1
    ) -> bool:
        """Whether, with so much more held, all begun micro-batches could be finished in turn."""
        m, cap = self.m, rank.capacity_bytes
        held = rank.live_bytes - rank.pending_bytes + more_bytes
        if held > cap:
            return False
        if self.head_s is not None:  # none is finished before all have begun
            return True
        # Each that is finished gives back what it takes for it, and more.
        if held + rank.one_bytes <= cap:
            return True
        first = rank.stages[0]
        begun = self.forwards[first] + (forwarded == first)
        for j in range(self.gradients[first], begun):
            for stage in rank.stages[1:]:
                if j >= self.forwards[stage] + (forwarded == stage):
                    held += self._forward_bytes(stage * m + j)
            if held > cap:
                return False
            for stage in reversed(rank.stages):
                if j < self.gradients[stage]:
                    continue
                unit = stage * m + j
                if unit in self.recomputed and unit != remade and unit not in self.remade:
                    held += self.kept[stage] - self.checkpoint[stage]
                    if held > cap:
                        return False
                held -= self.kept[stage]
        return True

    def _do(self, number: int, work: Work, now: float) -> None:
        rank, (kind, unit) = self.ranks[number], work
        stage, j = divmod(unit, self.m)
        end_s = rank.free_s = now + self.seconds[kind][stage]
        rank.order.append(work)
        is_short = kind == FORWARD and unit in self.recomputed
        rank.live_bytes += self.effects[stage][-1 if is_short else kind].left_bytes
        heapq.heappush(self.events, (end_s, number))
        if kind == FORWARD:
            self.forwards[stage] += 1
            if stage < self.last:
                self._arrive(self.input_s, stage + 1, j, end_s + self.link_s[stage])
            elif self.head_s is None:
                self.gradient_s[stage][j] = end_s
            elif self.forwards[stage] == self.m:
                rank.free_s = end_s + self.head_s
                self.gradient_s[stage] = [rank.free_s] * self.m
                heapq.heappush(self.events, (rank.free_s, number))
        elif kind == RECOMPUTE:
            self.remade.add(unit)
        elif kind == WEIGHT_GRAD:
            rank.pending.popleft()
            rank.pending_bytes -= self.deferred[stage]
        else:
            self.gradients[stage] += 1
            if kind == INPUT_GRAD:
                rank.pending.append(unit)
                rank.pending_bytes += self.deferred[stage]
            if stage > 0:
                self._arrive(self.gradient_s, stage - 1, j, end_s + self.link_s[stage - 1])

    def _arrive(self, arrivals: list[list[float]], stage: int, j: int, when_s: float) -> None:
        arrivals[stage][j] = when_s
        heapq.heappush(self.events, (when_s, self.rank_of[stage]))
