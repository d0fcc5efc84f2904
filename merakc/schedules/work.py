"""Orders in a form that is quick to run through: integers in place of actions.

A unit is one micro-batch of one stage, `stage * micro_batches + micro_batch`, so that the same
micro-batch in the stage before is `micro_batches` less. A work is a kind and a unit.
"""

from __future__ import annotations

from collections.abc import Sequence

from merakc.ir.program import COMPUTES, Action
from merakc.ir.schedule import Schedule

Work = tuple[int, int]
Orders = Sequence[Sequence[Work]]

FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD, RECOMPUTE = range(len(COMPUTES))
_NUMBER = {kind: number for number, kind in enumerate(COMPUTES)}


def count_micro_batches(schedule: Schedule) -> int:
    """One more than the highest micro-batch."""
    return 1 + max((a.micro_batch for order in schedule.orders for a in order), default=-1)


def encode(schedule: Schedule) -> list[list[Work]]:
    """The orders of a schedule of compute actions."""
    m = count_micro_batches(schedule)
    return [[(_NUMBER[a.kind], a.stage * m + a.micro_batch) for a in o] for o in schedule.orders]


def decode(name: str, rank_of: Sequence[int], orders: Orders, micro_batches: int) -> Schedule:
    """The schedule of encoded orders."""
    return Schedule(
        name,
        tuple(rank_of),
        tuple(tuple(to_action(work, micro_batches) for work in order) for order in orders),
    )


def to_action(work: Work, micro_batches: int) -> Action:
    """The action of a work."""
    kind, unit = work
    return Action(COMPUTES[kind], unit // micro_batches, unit % micro_batches)
