"""Whether a schedule can run to its end, and misses nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from merakc.errors import ProgramError
from merakc.ir.program import Action
from merakc.ir.schedule import Schedule
from merakc.schedules.work import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    RECOMPUTE,
    WEIGHT_GRAD,
    Orders,
    Work,
    count_micro_batches,
    encode,
    to_action,
)


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
    orders = encode(schedule)
    for rank, works in enumerate(orders):
        own = [s for s, holder in enumerate(schedule.rank_of) if holder == rank]
        _check_rank(rank, works, own, m)
    check_progress(orders, schedule.rank_of, m)


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


def _check_rank(rank: int, works: Sequence[Work], stages: Iterable[int], m: int) -> None:
    """What one rank can check alone: everything there, once, and in an order that computes."""
    done: set[Work] = set()
    for work in works:
        if fault := _fault(work, done):
            raise ProgramError(f"rank {rank}, {to_action(work, m)}: {fault}")
        done.add(work)
    for unit in (s * m + j for s in stages for j in range(m)):
        if missing := _missing(unit, done):
            raise ProgramError(f"rank {rank}, {to_action(missing, m)}: is missing")


def _missing(unit: int, done: set[Work]) -> Work | None:
    if (FORWARD, unit) not in done:
        return FORWARD, unit
    if (BACKWARD, unit) in done or (WEIGHT_GRAD, unit) in done:
        return None
    return (WEIGHT_GRAD if (INPUT_GRAD, unit) in done else BACKWARD), unit


def _fault(work: Work, done: set[Work]) -> str:
    """What is wrong with this work after the ones before it, if anything."""
    kind, unit = work
    differentiated = (BACKWARD, unit) in done or (INPUT_GRAD, unit) in done
    if work in done:
        return "runs a second time"
    if kind != FORWARD and (FORWARD, unit) not in done:
        return "stands before its forward"
    if kind == WEIGHT_GRAD and (INPUT_GRAD, unit) not in done:
        return "stands before its input gradient"
    if kind in (BACKWARD, INPUT_GRAD) and differentiated:
        return "its gradients are made already"
    if kind == RECOMPUTE and differentiated:
        return "stands after the backward that would read it"
    return ""


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
    stuck = {rank: needed for needed, rank in waiting.items()}
    cycle = [min(stuck)]
    while (peer := rank_of[stuck[cycle[-1]][1] // m]) not in cycle:
        cycle.append(peer)
    cycle = cycle[cycle.index(peer) :]
    circle = "; ".join(
        f"rank {rank} waits at {to_action(orders[rank][position[rank]], m)} for "
        f"{_name(stuck[rank], m)} of rank {rank_of[stuck[rank][1] // m]}"
        for rank in cycle
    )
    raise ProgramError(f"deadlock, each rank waits for the next: {circle}")


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
