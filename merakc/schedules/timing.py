"""When a schedule's actions start and end, and how many bytes its ranks hold, from stage costs.

An order is run with durations in place of kernels. A rank does one action after the other, so the
bytes that it holds follow from its order alone, and the times from a longest path. Reductions and
buffers of messages are left to `merakc.simulation.simulate`, which runs whole Programs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from merakc.ir.costs import Effect, StageCost
from merakc.ir.program import COMPUTES
from merakc.ir.schedule import Schedule
from merakc.schedules.check import check_schedule
from merakc.schedules.work import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    RECOMPUTE,
    Orders,
    Work,
    count_micro_batches,
    encode,
)

Seconds = tuple[float, ...]


@dataclass(frozen=True)
class Pipeline:
    """What the times of an order depend on.

    `link_s` are the seconds from each stage to the next, one fewer than there are stages; between
    stages of one rank they must be 0. Where `head_s` is not None, something that takes so long runs
    behind all forwards of the last stage, and every backward waits for it.
    """

    rank_of: tuple[int, ...]
    costs: tuple[StageCost, ...]
    micro_batches: int
    link_s: Seconds
    head_s: float | None = None

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.rank_of)

    @property
    def ranks(self) -> int:
        """Number of pipeline ranks."""
        return 1 + max(self.rank_of)

    @cached_property
    def effects(self) -> list[tuple[Effect, ...]]:
        """What the computes of each stage do."""
        return effects_of(self.costs)

    @cached_property
    def seconds(self) -> tuple[Seconds, ...]:
        """Of each kind of work, by stage."""
        return tuple(tuple(own[k].seconds for own in self.effects) for k in range(len(COMPUTES)))


def effects_of(costs: Sequence[StageCost]) -> list[tuple[Effect, ...]]:
    """What the computes of each stage do; of costs that are one value many times, told once."""
    known = {key: cost.effects for key, cost in {id(cost): cost for cost in costs}.items()}
    return [known[id(cost)] for cost in costs]


@dataclass(frozen=True, slots=True)
class Timing:
    """Start and end of each action, in seconds since the step began, rank by rank in order.

    `peak_bytes` are a rank's, static bytes included; `span_s` is the longest time from a rank's
    first start to its last end, which is what a step costs where the optimizer of one rank does
    not wait for another.
    """

    start_s: tuple[Seconds, ...]
    end_s: tuple[Seconds, ...]
    busy_s: Seconds
    peak_bytes: tuple[int, ...]
    makespan_s: float
    span_s: float


def make_pipeline(
    rank_of: Sequence[int],
    costs: Sequence[StageCost],
    micro_batches: int,
    latency_s: float | Sequence[float] = 0.0,
    head_s: float | None = None,
) -> Pipeline:
    """The pipeline of these stages, with one latency for all links between ranks or one each."""
    stages = len(rank_of)
    assert len(costs) == stages, f"{len(costs)} costs of {stages} stages"
    each = [latency_s] * (stages - 1) if isinstance(latency_s, int | float) else latency_s
    assert len(each) == stages - 1, f"{len(each)} latencies between {stages} stages"
    links = tuple(
        float(s) if a != b else 0.0 for s, a, b in zip(each, rank_of, rank_of[1:], strict=False)
    )
    return Pipeline(tuple(rank_of), tuple(costs), micro_batches, links, head_s)


def time_schedule(
    schedule: Schedule, costs: Sequence[StageCost], latency_s: float | Sequence[float] = 0.0
) -> Timing:
    """The times and the peak memory of a schedule.

    A forward waits for that of the stage before, a backward or input gradient for that of the
    stage after, `latency_s` later where another rank made it. A recomputation waits for nothing.

    Raises `ProgramError` as `check_schedule` does.
    """
    check_schedule(schedule)
    m = count_micro_batches(schedule)
    pipeline = make_pipeline(schedule.rank_of, costs, m, latency_s)
    orders = encode(schedule)
    ends = run_orders(pipeline, orders)
    assert ends is not None, "a checked schedule ran into a deadlock"
    seconds = pipeline.seconds
    starts = [
        tuple(end - seconds[kind][unit // m] for end, (kind, unit) in zip(e, o, strict=True))
        for e, o in zip(ends, orders, strict=True)
    ]
    spans = (e[-1] - s[0] for e, s in zip(ends, starts, strict=True) if e)
    return Timing(
        start_s=tuple(starts),
        end_s=tuple(map(tuple, ends)),
        busy_s=tuple(sum(seconds[kind][unit // m] for kind, unit in order) for order in orders),
        peak_bytes=tuple(peak_bytes(pipeline, r, order) for r, order in enumerate(orders)),
        makespan_s=max((e[-1] for e in ends if e), default=0.0),
        span_s=max(spans, default=0.0),
    )


def run_orders(pipeline: Pipeline, orders: Orders) -> list[list[float]] | None:
    """The end of each work, or None where ranks wait for each other in a circle.

    Each rank runs as far as it can; one that waits is woken by what it waits for.
    """
    m, last = pipeline.micro_batches, (pipeline.stages - 1) * pipeline.micro_batches
    seconds, links, head_s = pipeline.seconds, pipeline.link_s, pipeline.head_s
    inputs, gradients = [-1.0] * (last + m), [-1.0] * (last + m)  # when those of a unit arrive
    inputs[:m] = [0.0] * m
    gradients[last:] = [0.0 if head_s is None else -1.0] * m
    left = m  # forwards of the last stage
    for_input: dict[int, int] = {}  # the rank that waits, by unit
    for_gradient: dict[int, int] = {}
    ends: list[list[float]] = [[] for _ in orders]
    ready = list(range(len(orders)))
    while ready:
        rank = ready.pop()
        end, order = ends[rank], orders[rank]
        now = end[-1] if end else 0.0
        for position in range(len(end), len(order)):
            kind, unit = order[position]
            stage = unit // m
            if kind == FORWARD:
                came = inputs[unit]
                if came < 0.0:
                    for_input[unit] = rank
                    break
                now = (came if came > now else now) + seconds[kind][stage]
                if unit < last:
                    inputs[unit + m] = now + links[stage]
                    if unit + m in for_input:
                        ready.append(for_input.pop(unit + m))
                elif head_s is not None:
                    left -= 1
                    now += 0.0 if left else head_s
                    gradients[last:] = [-1.0 if left else now] * m
            elif kind <= INPUT_GRAD:
                came = gradients[unit]
                if came < 0.0:
                    for_gradient[unit] = rank
                    break
                now = (came if came > now else now) + seconds[kind][stage]
                if unit >= m:
                    gradients[unit - m] = now + links[stage - 1]
                    if unit - m in for_gradient:
                        ready.append(for_gradient.pop(unit - m))
            else:
                now += seconds[kind][stage]
            end.append(now)
    return None if for_input or for_gradient else ends


def recomputed_units(order: Sequence[Work]) -> set[int]:
    """The units of an order whose forward keeps a checkpoint alone."""
    return {unit for kind, unit in order if kind == RECOMPUTE}


def peak_bytes(pipeline: Pipeline, rank: int, order: Sequence[Work]) -> int:
    """The most bytes that a rank holds: static ones, what is kept, and an action's own peak."""
    costs, holders = pipeline.costs, pipeline.rank_of
    live = sum(c.static_bytes for c, r in zip(costs, holders, strict=True) if r == rank)
    peak = live
    for own, kept in zip(*footprints(pipeline, order), strict=True):
        peak = max(peak, live + own, live + kept)
        live += kept
    return peak


def footprints(pipeline: Pipeline, order: Sequence[Work]) -> tuple[list[int], list[int]]:
    """What each work allocates at its highest point, and leaves behind: less than 0, it frees."""
    m, effects = pipeline.micro_batches, pipeline.effects
    recomputed = recomputed_units(order)
    own, kept = [], []
    for kind, unit in order:
        is_short = kind == FORWARD and unit in recomputed
        _, peak_bytes, left_bytes = effects[unit // m][-1 if is_short else kind]
        own.append(peak_bytes)
        kept.append(left_bytes)
    return own, kept


def with_recomputation(orders: Orders, units: Collection[int]) -> list[list[Work]]:
    """The orders with a recomputation of these units in front of their backwards."""
    return [
        [
            step
            for kind, unit in order
            for step in (
                [(RECOMPUTE, unit), (kind, unit)]
                if kind in (BACKWARD, INPUT_GRAD) and unit in units
                else [(kind, unit)]
            )
        ]
        for order in orders
    ]
