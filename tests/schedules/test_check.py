"""Orders that cannot run, or miss something, are refused with what and where."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from merakc.errors import ProgramError
from merakc.ir.program import Action, ActionKind
from merakc.ir.schedule import Schedule
from merakc.schedules.check import check_schedule
from merakc.schedules.registry import NAMES, make_schedule
from merakc.schedules.text import parse_schedule


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0 0F0 0B0", r"rank 0, 0F0: runs a second time"),
        ("0B0 0F0", r"rank 0, 0B0: stands before its forward"),
        ("0F0 0B0; 1F0", r"rank 1, 1B0: is missing"),
        ("0F0 0F1 0B0 0B1; 1F0 1B0", r"rank 1, 1F1: is missing"),
        ("0F0 0I0", r"rank 0, 0W0: is missing"),
        ("0F0 0W0 0I0", r"rank 0, 0W0: stands before its input gradient"),
        ("0F0 0B0 0I0 0W0", r"rank 0, 0I0: its gradients are made by its backward already"),
        ("0F0 0I0 0B0 0W0", r"rank 0, 0B0: its gradients are made by its input"),
        ("0R0 0F0 0B0", r"rank 0, 0R0: stands before its forward"),
        ("0F0 0B0 0R0", r"rank 0, 0R0: stands after the backward that would read what"),
        ("0F0 0R0 0R0 0B0", r"rank 0, 0R0: runs a second time"),
        (
            "0F0 0B0 0F1 0B1; 1F0 1F1 1B0 1B1",
            r"rank 0 waits at 0B0 for the gradient of 1F0 of rank 1; "
            r"rank 1 waits at 1F1 for 0F1 of rank 0",
        ),
        (
            "3F0 0F0 3B0 0B0; 1F0 2F0 2B0 1B0; 4F0 4B0",
            r"rank 0 waits at 3F0 for 2F0 of rank 1; rank 1 waits at 1F0 for 0F0 of rank 0$",
        ),
        ("1F0 0F0 1B0 0B0", r"rank 0 waits at 1F0 for 0F0 of rank 0$"),
    ],
)
def test_refused(text: str, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        parse_schedule(text)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (Action(ActionKind.SEND, 0, 0, "x", 1, 8), r"rank 0, .*: a schedule has compute actions"),
        (Action(ActionKind.FORWARD, 2, 0), r"rank 0, 2F0: there are 2 stages"),
        (Action(ActionKind.FORWARD, 1, 0), r"rank 0, 1F0: stage 1 is on rank 1"),
        (Action(ActionKind.FORWARD, 0, -1), r"rank 0, 0F-1: micro-batches count from 0"),
    ],
)
def test_actions_out_of_place(action: Action, message: str) -> None:
    good = make_schedule("1f1b", 2, 2)
    bad = Schedule("bad", good.rank_of, ((action, *good.orders[0]), good.orders[1]))
    with pytest.raises(ProgramError, match=message):
        check_schedule(bad)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_mutated_orders_are_refused_or_run(data: st.DataObject) -> None:
    """Against a slow referee: run whatever can run, one action at a time, until nothing can."""
    name = data.draw(st.sampled_from(NAMES))
    schedule = make_schedule(name, data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4)))
    orders = [list(order) for order in schedule.orders]
    for _ in range(data.draw(st.integers(1, 3))):
        if not any(orders):
            break
        order = data.draw(st.sampled_from([o for o in orders if o]))
        at = data.draw(st.integers(0, len(order) - 1))
        action = order.pop(at)
        match data.draw(st.sampled_from(["move", "drop", "twice"])):
            case "move":
                order.insert(data.draw(st.integers(0, len(order))), action)
            case "twice":
                order[at:at] = [action, action]
    mutated = Schedule(name, schedule.rank_of, tuple(map(tuple, orders)))
    if referee(mutated):
        check_schedule(mutated)
    else:
        with pytest.raises(ProgramError):
            check_schedule(mutated)


def referee(schedule: Schedule) -> bool:
    done: set[str] = set()
    left = [list(order) for order in schedule.orders]
    last = schedule.stages - 1

    def may_run(a: Action) -> bool:
        s, j = a.stage, a.micro_batch
        if a.kind is ActionKind.FORWARD:
            return s == 0 or f"{s - 1}F{j}" in done
        if a.kind is ActionKind.WEIGHT_GRAD:
            return f"{s}I{j}" in done
        grad = s == last or not done.isdisjoint({f"{s + 1}B{j}", f"{s + 1}I{j}"})
        if a.kind is ActionKind.RECOMPUTE:
            return f"{s}F{j}" in done and done.isdisjoint({f"{s}B{j}", f"{s}I{j}"})
        return f"{s}F{j}" in done and grad

    moved = True
    while moved:
        moved = False
        for order in left:
            if order and may_run(order[0]):
                done.add(str(order.pop(0)))
                moved = True
    names = Counter(str(a) for order in schedule.orders for a in order)
    m = 1 + max((a.micro_batch for order in schedule.orders for a in order), default=-1)
    whole = all(
        f"{s}F{j}" in done and (f"{s}B{j}" in done) != ({f"{s}I{j}", f"{s}W{j}"} <= done)
        for s in range(last + 1)
        for j in range(m)
    )
    return whole and not any(left) and max(names.values(), default=1) == 1
