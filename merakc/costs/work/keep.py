"""How much a micro-batch may keep on each stage, so that all in flight fit the memory.

Later stages hold fewer micro-batches in flight, so they may keep more of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from merakc.ir.costs import StageCost
from merakc.ir.program import ActionKind
from merakc.ir.schedule import Schedule

EVERYTHING = -1


def keep_bytes(
    schedule: Schedule, costs: Sequence[StageCost], capacity_bytes: Sequence[int]
) -> tuple[int, ...]:
    """What each stage may keep of a micro-batch from its forward to its backward.

    `capacity_bytes` are of each rank, static bytes included. -1 is everything. A micro-batch that
    is being recomputed or differentiated has all that is saved; the others share the rest, stages
    of one rank in proportion to what they save. A stage that has too little may keep 0.
    """
    flying = [in_flight(schedule, stage) for stage in range(schedule.stages)]
    return shared_out(schedule.rank_of, flying, costs, capacity_bytes)


def shared_out(
    rank_of: Sequence[int],
    flying: Sequence[int],
    costs: Sequence[StageCost],
    capacity_bytes: Sequence[int],
) -> tuple[int, ...]:
    """The same, of stages with so many micro-batches in flight at the most."""
    found = [0] * len(rank_of)
    for rank, capacity in enumerate(capacity_bytes):
        own = [s for s, holder in enumerate(rank_of) if holder == rank]
        static = sum(costs[s].static_bytes for s in own)
        working = max(
            costs[s].saved_bytes + max(costs[s].backward_peak_bytes, costs[s].recompute_peak_bytes)
            for s in own
        )
        all_kept = sum(flying[s] * costs[s].saved_bytes for s in own)
        peak = max(max(costs[s].backward_peak_bytes, costs[s].forward_peak_bytes) for s in own)
        suffices = static + all_kept + peak <= capacity
        free = max(capacity - static - working, 0)
        for s in own:
            share = free * costs[s].saved_bytes / max(all_kept, 1)
            found[s] = EVERYTHING if suffices else min(int(share), costs[s].saved_bytes)
    return tuple(found)


def with_kept(cost: StageCost, kept_bytes: int) -> StageCost:
    """The cost of a stage that keeps so much: it recomputes that much less, as a first estimate."""
    if kept_bytes == EVERYTHING or not cost.saved_bytes:
        return cost
    share = min(kept_bytes / cost.saved_bytes, 1.0)
    return replace(
        cost,
        checkpoint_bytes=max(kept_bytes, cost.checkpoint_bytes),
        recompute_s=cost.recompute_s * (1.0 - share),
        checkpoint_peak_bytes=max(cost.checkpoint_peak_bytes, kept_bytes),
    )


def within_backward(cost: StageCost) -> StageCost:
    """The cost of a stage of which each backward makes again, block by block, what a recomputation
    would: a checkpoint is all that is saved, and a block is alive beside.
    """
    return replace(
        cost,
        backward_s=cost.backward_s + cost.recompute_s,
        input_grad_s=cost.input_grad_s + cost.recompute_s,
        recompute_s=0.0,
        saved_bytes=cost.checkpoint_bytes,
        backward_peak_bytes=cost.backward_peak_bytes + cost.recompute_peak_bytes,
        input_grad_peak_bytes=cost.input_grad_peak_bytes + cost.recompute_peak_bytes,
    )


def partly_again(
    rank_of: Sequence[int],
    flying: Sequence[int],
    whole: Sequence[StageCost],
    again: Sequence[StageCost],
    capacity_bytes: Sequence[int],
) -> list[StageCost]:
    """Between stages that keep all and the same `within_backward`: as much more than these is kept
    as fits, stages of one rank alike. A first estimate.
    """
    found = []
    for rank, most, least in zip(rank_of, whole, again, strict=True):
        own = [s for s, holder in enumerate(rank_of) if holder == rank]
        held = sum(again[s].static_bytes + flying[s] * again[s].saved_bytes for s in own)
        peaks = (max(c[s].backward_peak_bytes, c[s].forward_peak_bytes)
                 for c in (whole, again) for s in own)  # fmt: skip
        free = max(capacity_bytes[rank] - held - max(peaks), 0)
        more = sum(flying[s] * (whole[s].saved_bytes - again[s].saved_bytes) for s in own)
        share = min(free / more, 1.0) if more > 0 else 1.0
        found.append(
            replace(
                least,
                backward_s=least.backward_s + share * (most.backward_s - least.backward_s),
                input_grad_s=least.input_grad_s + share * (most.input_grad_s - least.input_grad_s),
                saved_bytes=least.saved_bytes + int(share * (most.saved_bytes - least.saved_bytes)),
                backward_peak_bytes=max(least.backward_peak_bytes, most.backward_peak_bytes),
                input_grad_peak_bytes=max(least.input_grad_peak_bytes, most.input_grad_peak_bytes),
            )
        )
    return found


def in_flight(schedule: Schedule, stage: int) -> int:
    """The most micro-batches between their forward and their backward at one time."""
    now = most = 0
    for action in schedule.orders[schedule.rank_of[stage]]:
        if action.stage == stage:
            now += action.kind is ActionKind.FORWARD
            most = max(most, now)
            now -= action.kind.sends_gradients
    return most
