"""How short a step can be at best, by work and by memory, and what must be recomputed for it.

A rank that holds `capacity` bytes for T seconds has capacity x T byte-seconds to spend. Each
micro-batch of a stage spends what its forward keeps for at least as long as it takes to go down
the pipeline from there and come back; recomputing it trades byte-seconds for seconds of work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from merakc.ir.costs import StageCost
from merakc.schedules.timing import Pipeline


@dataclass(frozen=True, slots=True)
class Recomputation:
    """The share of each stage's micro-batches that is recomputed, and what follows from it.

    `period_s` are each rank's seconds per micro-batch: its work, or, where its memory is too
    small even for recomputing everything, its byte-seconds divided by its capacity. `spare` is
    how many micro-batches more than need be every rank's memory could hold at a time.
    """

    shares: tuple[float, ...]
    period_s: tuple[float, ...]
    spare: float


@dataclass(frozen=True, slots=True)
class _Stage:
    """What one micro-batch takes of a stage at least; byte-seconds kept whole or recomputed."""

    work_s: float
    again_s: float
    whole: float
    again: float


def can_split(costs: Sequence[StageCost]) -> bool:
    """Whether the costs say what the halves of every backward take."""
    return all(c.input_grad_s + c.weight_grad_s > 0.0 or c.backward_s == 0.0 for c in costs)


def lower_bound_s(pipeline: Pipeline, capacity_bytes: Sequence[float]) -> float:
    """No schedule of this pipeline that stays within the capacities is shorter, in seconds.

    The longest of: each rank's wait for its first input and its work on all micro-batches, with
    the recomputation that its memory asks for; one micro-batch all the way and back.
    """
    costs, links, m = pipeline.costs, pipeline.link_s, pipeline.micro_batches
    split = can_split(costs)
    periods = least_recomputation(pipeline, capacity_bytes).period_s
    there_s = sum(c.forward_s for c in costs) + sum(links)
    back_s = sum(_gradient_s(c, split) for c in costs[1:]) + sum(links)
    bounds_s = [there_s + back_s + _backward_s(costs[0], split)]
    for rank, period_s in enumerate(periods):
        first = pipeline.rank_of.index(rank)
        head_s = sum(c.forward_s for c in costs[:first]) + sum(links[:first])
        # Weight gradients may fill the time in which the last gradients go back.
        back_s = sum(c.backward_s for c in costs[:first]) + sum(links[:first])
        bounds_s.append(head_s + m * period_s + (0.0 if split else back_s))
    return max(bounds_s)


def least_recomputation(
    pipeline: Pipeline, capacity_bytes: Sequence[float], usable: float = 1.0
) -> Recomputation:
    """The least recomputation with which `usable` of each rank's byte-seconds suffice.

    Where `usable` is 1, no schedule of this pipeline has a rank with a shorter period. Stages
    that spare most byte-seconds per second of recomputation come first.
    """
    stages = _stages(pipeline)
    shares = [0.0] * pipeline.stages
    periods, spares = [], []
    for rank in range(pipeline.ranks):
        own = {s: stages[s] for s in range(pipeline.stages) if pipeline.rank_of[s] == rank}
        static = sum(pipeline.costs[s].static_bytes for s in own)
        all_bytes = max(1.0, capacity_bytes[rank] - static)
        free_bytes = usable * all_bytes
        period_s = sum(stage.work_s for stage in own.values())
        spent = sum(stage.whole for stage in own.values())
        by_gain = sorted(own, key=lambda s: (own[s].again - own[s].whole) / own[s].again_s)
        for s in by_gain:
            spared, short = own[s].whole - own[s].again, spent - free_bytes * period_s
            if short <= 0.0 or spared <= 0.0:
                break
            shares[s] = min(1.0, short / (spared + free_bytes * own[s].again_s))
            spent -= spared * shares[s]
            period_s += own[s].again_s * shares[s]
        period_s = max(period_s, spent / free_bytes)
        periods.append(period_s)
        kept = sum(_kept_bytes(pipeline.costs[s], shares[s]) for s in own)
        spares.append((all_bytes - spent / period_s) / max(kept, 1.0) if period_s else 0.0)
    return Recomputation(tuple(shares), tuple(periods), max(0.0, min(spares)))


def _kept_bytes(cost: StageCost, share: float) -> float:
    """What a forward keeps, on average."""
    return (1.0 - share) * cost.saved_bytes + share * cost.checkpoint_bytes


def _stages(pipeline: Pipeline) -> list[_Stage]:
    split = can_split(pipeline.costs)
    stages: list[_Stage] = []
    below_s = 0.0  # down from the stage and back to it
    for s in reversed(range(pipeline.stages)):
        c = pipeline.costs[s]
        forth_s, back_s = c.forward_s + below_s, _gradient_s(c, split)
        fused_s = max(0.0, c.backward_s - back_s)  # the rest of a whole backward
        later = min(c.deferred_bytes * c.weight_grad_s, c.saved_bytes * fused_s) if split else 0.0
        stages.append(
            _Stage(
                work_s=c.forward_s + _backward_s(c, split),
                again_s=max(c.recompute_s, 1e-12),
                whole=c.saved_bytes * (forth_s + back_s) + later,
                again=c.checkpoint_bytes * (forth_s + back_s)
                + (c.saved_bytes - c.checkpoint_bytes) * (c.recompute_s + back_s)
                + later,
            )
        )
        below_s = forth_s + back_s + (2 * pipeline.link_s[s - 1] if s else 0.0)
    return stages[::-1]


def _gradient_s(cost: StageCost, split: bool) -> float:
    """Seconds until the stage before may go on."""
    return min(cost.input_grad_s, cost.backward_s) if split else cost.backward_s


def _backward_s(cost: StageCost, split: bool) -> float:
    """Seconds until the weight gradients are there too."""
    halves_s = cost.input_grad_s + cost.weight_grad_s
    return min(halves_s, cost.backward_s) if split else cost.backward_s
