"""ZB-V, V-Half and V-Min: two stages a rank, down the ranks and back up again.

Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", section 4 and appendix: each is
one building block, the places in time of one micro-batch's actions on every rank, repeated every
six slots, as many as a rank's two stages have actions. What a rank's memory holds follows from how
long the block is. Weight gradients fill the free slots; running the order squeezes it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from merakc.ir.costs import StageCost
from merakc.schedules.list_scheduler import Rules, list_schedule
from merakc.schedules.placement import place
from merakc.schedules.timing import make_pipeline, run_orders
from merakc.schedules.work import FORWARD, INPUT_GRAD, WEIGHT_GRAD, Work

_UNIT = StageCost(1.0, 2.0, input_grad_s=1.0, weight_grad_s=1.0, saved_bytes=1, deferred_bytes=1)
_PERIOD = 6
# The slots of forward down, forward up, input gradient down the stages' list, and back up.
Block = Callable[[int, int], tuple[int, int, int, int]]


def v_min(ranks: int, micro_batches: int) -> list[list[Work]]:
    """A third of 1F1B's memory, and up to 4/3 micro-batches."""
    return _repeat(_min_block, ranks, micro_batches)


def v_half(ranks: int, micro_batches: int) -> list[list[Work]]:
    """Half of 1F1B's memory, and up to one micro-batch."""
    return _repeat(_half_block, ranks, micro_batches)


@lru_cache(maxsize=32)  # of which no caller changes the orders
def zb_v(ranks: int, micro_batches: int) -> list[list[Work]]:
    """1F1B's memory, and no bubble but that of the start.

    Scheduled as a list in unit times, with weight gradients first or in gaps alone, whichever is
    the shorter: the first leaves no gap with at least as many micro-batches as ranks.
    """
    rank_of = place("v", ranks, 2)
    pipeline = make_pipeline(rank_of, [_UNIT] * len(rank_of), micro_batches)
    capacity_bytes = [2 * ranks * _UNIT.saved_bytes] * ranks
    found = []
    for rules in (Rules(max_pending=0, oldest_first=False), Rules()):
        orders = list_schedule(pipeline, capacity_bytes, rules)
        ends = run_orders(pipeline, orders) if orders else None
        assert orders is not None, "1F1B's memory holds a micro-batch"
        assert ends is not None, "a list schedule ran into a deadlock"
        found.append((max(end[-1] for end in ends), orders))
    return min(found, key=lambda item: item[0])[1]


def _min_block(rank: int, ranks: int) -> tuple[int, int, int, int]:
    apart = 2 if ranks % 3 == 0 else 0  # where slots of the two halves would fall together
    return (rank, 2 * ranks - rank - 1, 2 * ranks + apart + rank, 4 * ranks + apart - rank - 1)


def _half_block(rank: int, ranks: int) -> tuple[int, int, int, int]:
    apart = 3 if ranks % 2 == 0 else 0
    return (
        2 * rank,
        3 * ranks - rank - 2,
        3 * ranks + apart + 2 * rank - 1,
        6 * ranks + apart - rank - 2,
    )


def _repeat(block: Block, ranks: int, micro_batches: int) -> list[list[Work]]:
    m = micro_batches
    orders = []
    for rank in range(ranks):
        down, up = rank * m, (2 * ranks - 1 - rank) * m
        kinds = ((FORWARD, down), (FORWARD, up), (INPUT_GRAD, up), (INPUT_GRAD, down))
        slots = {
            slot + _PERIOD * j: (kind, first + j)
            for slot, (kind, first) in zip(block(rank, ranks), kinds, strict=True)
            for j in range(m)
        }
        assert len(slots) == len(kinds) * m, "two actions in one slot"
        orders.append(_fill(slots))
    return orders


def _fill(slots: dict[int, Work]) -> list[Work]:
    """The slots in order, with each weight gradient in the first free one."""
    order: list[Work] = []
    waiting: list[int] = []
    for slot in range(max(slots) + 1):
        if slot in slots:
            kind, unit = slots[slot]
            order.append((kind, unit))
            if kind == INPUT_GRAD:
                waiting.append(unit)
        elif waiting:
            order.append((WEIGHT_GRAD, waiting.pop(0)))
    return order + [(WEIGHT_GRAD, unit) for unit in waiting]
