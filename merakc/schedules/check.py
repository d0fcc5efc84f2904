"""Whether a schedule can run to its end, and misses nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from merakc.errors import ProgramError
from merakc.ir.program import Action
from merakc.ir.schedule import Schedule
from merakc.schedules.work import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    Orders,
    Work,
    count_micro_batches,
    encode,
    to_action,
)
from merakc.simulation.faults import deadlock, verify_computes


def check_schedule(schedule: Schedule) -> None:
    """Raises `ProgramError`, naming rank and action, unless the schedule is complete and can run.

    Every stage has a rank that holds it; each of its micro-batches runs forward once, then
    backward once, whole or as input gradient and, later, weight gradient, and is recomputed at
    most once, in between. No ranks wait for each other in a circle.
    """
    for rank, order in enumerate(schedule.orders):
        for action in order:
            _check_place(schedule, rank, action)
    m = count_micro_batches(schedule)
    for rank, order in enumerate(schedule.orders):
        own = [s for s, holder in enumerate(schedule.rank_of) if holder == rank]
        verify_computes(rank, order, own, m)
    check_progress(encode(schedule), schedule.rank_of, m)


def _check_place(schedule: Schedule, rank: int, action: Action) -> None:
    where = f"schedule {schedule.name}, rank {rank}, {action}"
    if not action.kind.is_compute:
        raise ProgramError(f"{where}: a schedule has compute actions alone, of kinds F B I W R")
    if not 0 <= action.stage < schedule.stages:
        raise ProgramError(f"{where}: there are {schedule.stages} stages, from 0")
    if (holder := schedule.rank_of[action.stage]) != rank:
        raise ProgramError(f"{where}: stage {action.stage} is on rank {holder}")
    if action.micro_batch < 0:
        raise ProgramError(f"{where}: micro-batches count from 0")


def check_progress(orders: Orders, rank_of: Sequence[int], micro_batches: int) -> None:
    """Raises `ProgramError` where ranks wait for each other, with the circle of actions."""
    m, stages = micro_batches, len(rank_of)
    position = [0] * len(orders)
    done: set[tuple[bool, int]] = set()
    waiting: dict[tuple[bool, int], int] = {}
    ready = deque(range(len(orders)))
    while ready:
        rank = ready.popleft()
        for work in orders[rank][position[rank] :]:
            needed = needs(work, m, stages)
            if needed is not None and needed not in done:
                waiting[needed] = rank
                break
            position[rank] += 1
            made = makes(work)
            if made is not None:
                done.add(made)
                if made in waiting:
                    ready.append(waiting.pop(made))
    if not waiting:
        return
    raise deadlock(
        {
            rank: (
                rank_of[needed[1] // m],
                f"rank {rank} waits at {to_action(orders[rank][position[rank]], m)} for "
                f"{_name(needed, m)} of rank {rank_of[needed[1] // m]}",
            )
            for needed, rank in waiting.items()
        }
    )


def needs(work: Work, micro_batches: int, stages: int) -> tuple[bool, int] | None:
    """What must arrive from another stage: whether it is a gradient, and the unit it is of."""
    kind, unit = work
    if kind == FORWARD and unit >= micro_batches:
        return False, unit - micro_batches
    if kind in (BACKWARD, INPUT_GRAD) and unit + micro_batches < stages * micro_batches:
        return True, unit + micro_batches
    return None


def makes(work: Work) -> tuple[bool, int] | None:
    """What another stage may wait for, in the form of `needs`."""
    kind, unit = work
    if kind == FORWARD:
        return False, unit
    return (True, unit) if kind in (BACKWARD, INPUT_GRAD) else None


def _name(needed: tuple[bool, int], m: int) -> str:
    is_grad, unit = needed
    return f"the gradient of {unit // m}F{unit % m}" if is_grad else f"{unit // m}F{unit % m}"
