"""Better orders from an order: recomputations that memory does not need, and a local search."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from merakc.schedules.timing import Pipeline, footprints, peak_bytes, run_orders
from merakc.schedules.work import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    RECOMPUTE,
    WEIGHT_GRAD,
    Orders,
    Work,
)

# A move shifts a work past so many others. The gap that a work should fill is seldom farther.
_REACH = 12
# A worse order is gone on from while it is within this share of the best: flat valleys are wide.
_SLACK = 0.01


def makespan_s(pipeline: Pipeline, orders: Orders) -> float:
    """The end of the last work; infinite where the orders lock up."""
    ends = run_orders(pipeline, orders)
    return max(end[-1] for end in ends if end) if ends else float("inf")


def drop_recomputations(
    pipeline: Pipeline, orders: Orders, capacity_bytes: Sequence[float]
) -> list[list[Work]]:
    """The orders without those recomputations whose activations fit from forward to backward.

    Later ones first: at the end of a step fewer micro-batches share the memory.
    """
    return [_drop(pipeline, rank, order, capacity_bytes[rank]) for rank, order in enumerate(orders)]


def _drop(
    pipeline: Pipeline, rank: int, order: Sequence[Work], capacity_bytes: float
) -> list[Work]:
    if not any(kind == RECOMPUTE for kind, _ in order):
        return list(order)
    costs, m = pipeline.costs, pipeline.micro_batches
    tops, kept = footprints(pipeline, order)
    static = sum(c.static_bytes for c, r in zip(costs, pipeline.rank_of, strict=True) if r == rank)
    before = np.array([0, *accumulate(kept)][:-1], dtype=float) + static
    free = capacity_bytes - before - np.maximum(tops, kept)  # at each work's highest point
    place = {unit: i for i, (kind, unit) in enumerate(order) if kind == FORWARD}
    dropped = set()
    for at in range(len(order) - 1, -1, -1):
        kind, unit = order[at]
        if kind != RECOMPUTE:
            continue
        cost = costs[unit // m]
        more = cost.saved_bytes - cost.checkpoint_bytes
        begin = place[unit]
        own = max(cost.forward_peak_bytes, cost.saved_bytes) - max(tops[begin], kept[begin])
        between = free[begin + 1 : at]
        if free[begin] >= own and (not between.size or between.min() >= more):
            free[begin] -= own
            free[begin + 1 : at] -= more
            dropped.add(unit)
    return [(kind, unit) for kind, unit in order if kind != RECOMPUTE or unit not in dropped]


def fuse_backwards(pipeline: Pipeline, orders: Orders) -> list[list[Work]]:
    """The orders with one backward for an input gradient and the weight gradient right after it."""
    m, costs = pipeline.micro_batches, pipeline.costs
    fused: list[list[Work]] = []
    for order in orders:
        out: list[Work] = []
        for kind, unit in order:
            cost = costs[unit // m]
            halves_s = cost.input_grad_s + cost.weight_grad_s
            if (
                kind == WEIGHT_GRAD
                and out[-1] == (INPUT_GRAD, unit)
                and cost.backward_s <= halves_s
            ):
                out[-1] = (BACKWARD, unit)
            else:
                out.append((kind, unit))
        fused.append(out)
    return fused


def local_search(
    pipeline: Pipeline,
    orders: Orders,
    capacity_bytes: Sequence[float],
    runs: int,
    target_s: float = 0.0,
) -> list[list[Work]]:
    """The best of `runs` orders, each a work moved along the critical path of one before.

    A work on the path that waits for its rank alone is put before what keeps the rank, or that
    after it. Micro-batches stay in ascending order in every stage, as messages must. Stops at
    `target_s`. The same arguments give the same orders.
    """
    draw = random.Random(0)
    best = now = [list(order) for order in orders]
    ends = run_orders(pipeline, now)
    assert ends is not None, "a local search starts from orders that run"
    best_s = now_s = max(end[-1] for end in ends if end)
    blocked = _blocked(pipeline, now, ends)
    for _ in range(runs):
        if best_s <= target_s or not blocked:
            break
        rank, at = blocked[draw.randrange(len(blocked))]
        moved = _move(now[rank], at, pipeline.micro_batches, draw)
        if moved is None or peak_bytes(pipeline, rank, moved) > capacity_bytes[rank]:
            continue
        tried = [*now[:rank], moved, *now[rank + 1 :]]
        tried_ends = run_orders(pipeline, tried)
        if tried_ends is None:
            continue
        tried_s = max(end[-1] for end in tried_ends if end)
        if tried_s <= max(now_s, best_s * (1.0 + _SLACK * draw.random() ** 3)):
            now, now_s = tried, tried_s
            blocked = _blocked(pipeline, now, tried_ends)
            if now_s < best_s:
                best, best_s = now, now_s
    return best


def _move(
    order: Sequence[Work], at: int, micro_batches: int, draw: random.Random
) -> list[Work] | None:
    """The work at `at` some places earlier, or the one before it later; None if it may not."""
    steps = 1 + draw.randrange(_REACH) if draw.random() < 0.5 else 1
    if draw.random() < 0.5:
        to = max(0, at - steps)
        work, passed = order[at], order[to:at]
        middle = [work, *passed]
        first, last = to, at + 1
    else:
        to = min(len(order) - 1, at - 1 + steps)
        work, passed = order[at - 1], order[at : to + 1]
        middle = [*passed, work]
        first, last = at - 1, to + 1
    if any(_are_ordered(work, other, micro_batches) for other in passed):
        return None
    return [*order[:first], *middle, *order[last:]]


def _are_ordered(one: Work, other: Work, micro_batches: int) -> bool:
    """Whether two works of a rank may not pass each other, whatever other ranks do."""
    (kind, unit), (kind_other, unit_other) = one, other
    if unit == unit_other:
        return True
    messages = (kind == FORWARD) == (kind_other == FORWARD) and max(kind, kind_other) <= INPUT_GRAD
    return messages and unit // micro_batches == unit_other // micro_batches


def _blocked(
    pipeline: Pipeline, orders: Orders, ends: Sequence[Sequence[float]]
) -> list[tuple[int, int]]:
    """The works of the critical path that wait for the work before them on their rank."""
    m, seconds, links = pipeline.micro_batches, pipeline.seconds, pipeline.link_s
    place = {
        (kind == FORWARD, unit): (rank, at)
        for rank, order in enumerate(orders)
        for at, (kind, unit) in enumerate(order)
        if kind <= INPUT_GRAD
    }
    rank = max((r for r in range(len(ends)) if ends[r]), key=lambda r: ends[r][-1])
    at = len(ends[rank]) - 1
    found = []
    while True:
        kind, unit = orders[rank][at]
        start_s = ends[rank][at] - seconds[kind][unit // m]
        source = None
        if kind == FORWARD and unit >= m:
            source, link_s = place[True, unit - m], links[unit // m - 1]
        elif kind in (BACKWARD, INPUT_GRAD) and unit // m + 1 < pipeline.stages:
            source, link_s = place[False, unit + m], links[unit // m]
        if at and (source is None or ends[rank][at - 1] >= ends[source[0]][source[1]] + link_s):
            found.append((rank, at))
            at -= 1
        elif source is not None and start_s > 0.0:
            rank, at = source
        else:
            return found
