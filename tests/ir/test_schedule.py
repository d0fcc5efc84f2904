"""The order of work before messages."""

from __future__ import annotations

from merakc.ir.program import Action, ActionKind
from merakc.ir.schedule import Schedule


def test_a_rank_may_hold_several_stages() -> None:
    orders = tuple(
        tuple(Action(ActionKind.FORWARD, stage) for stage in own) for own in ((0, 3), (1, 2))
    )
    schedule = Schedule("v", (0, 1, 1, 0), orders)
    assert (schedule.ranks, schedule.stages) == (2, 4)
    held = {action.stage: rank for rank, order in enumerate(orders) for action in order}
    assert tuple(held[stage] for stage in range(4)) == schedule.rank_of
