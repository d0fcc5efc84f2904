"""Schedules as text: `0F0 0F1 0B0 0B1; 1F0 1B0 1F1 1B1`.

One part per rank, between semicolons or on lines of their own, with its actions in order: stage,
kind (F forward, B backward, I input gradient, W weight gradient, R recomputation), micro-batch.
The ranks of the stages follow from who runs them. `#` begins a comment.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from merakc.errors import ProgramError
from merakc.ir.program import Action, ActionKind
from merakc.ir.schedule import Schedule
from merakc.schedules.check import check_schedule

_ACTION = re.compile(r"(\d+)([FBIWR])(\d+)")


def format_schedule(schedule: Schedule) -> str:
    """The schedule's text, one line per rank. `parse_schedule` gives the schedule back."""
    return "\n".join(" ".join(map(str, order)) for order in schedule.orders)


def parse_schedule(text: str, name: str = "custom") -> Schedule:
    """The schedule that the text describes, checked.

    Raises `ProgramError`, with the rank and the number of the action in it, for what is no action,
    stages that are on several ranks or on none, and what `check_schedule` refuses.
    """
    orders = tuple(
        tuple(_parse_action(word, rank, number) for number, word in enumerate(part.split()))
        for rank, part in enumerate(_parts(text))
    )
    if not orders:
        raise ProgramError(f"schedule {name} is empty; write one line of actions per rank")
    schedule = Schedule(name, _rank_of(orders), orders)
    check_schedule(schedule)
    return schedule


def _parts(text: str) -> Iterator[str]:
    for line in text.splitlines():
        for part in line.split("#")[0].split(";"):
            if part.strip():
                yield part


def _parse_action(word: str, rank: int, number: int) -> Action:
    match = _ACTION.fullmatch(word)
    if match is None:
        raise ProgramError(
            f"rank {rank}, action {number}: {word!r} is no action; write stage, one of F B I W R, "
            f"and micro-batch, such as 0F3"
        )
    stage, kind, micro_batch = match.groups()
    return Action(ActionKind(kind), int(stage), int(micro_batch))


def _rank_of(orders: tuple[tuple[Action, ...], ...]) -> tuple[int, ...]:
    holders: dict[int, int] = {}
    for rank, order in enumerate(orders):
        for number, action in enumerate(order):
            holder = holders.setdefault(action.stage, rank)
            if holder != rank:
                raise ProgramError(
                    f"rank {rank}, action {number}, {action}: stage {action.stage} is on rank "
                    f"{holder} already; a stage has one rank"
                )
    missing = next((s for s in range(len(holders)) if s not in holders), None)
    if missing is not None:
        raise ProgramError(
            f"no rank runs stage {missing}, but one runs stage {max(holders)}; number the stages "
            f"from 0 on"
        )
    return tuple(holders[stage] for stage in range(len(holders)))
