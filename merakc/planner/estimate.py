"""The seconds of a step from the pieces of a model: in milliseconds, with no graph of any stage.

What thousands of candidates are compared by. The orders of work are those that the runtime runs;
only their costs come from pieces in place of the stages' own graphs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

from merakc.costs.buckets import state_group
from merakc.costs.fabric import Group, all_reduce_seconds, message_seconds
from merakc.costs.measured import NONE, Corrections
from merakc.costs.pipeline_links import crossing
from merakc.costs.stages import (
    optimizer_seconds,
)
from merakc.costs.state import (
    STEADY,
    exposed_seconds,
)
from merakc.costs.work import keep
from merakc.costs.work.pieces import Piece
from merakc.ir.costs import StageCost
from merakc.ir.recompute import IN_BACKWARD
from merakc.ir.state import UNSHARDED, StateShards
from merakc.ir.strategy import Strategy
from merakc.machines.cluster import Hardware
from merakc.planner.job import PLAIN, Framework, Job, make_job
from merakc.schedules.bound import lower_bound_s
from merakc.schedules.known_orders import KnownOrders, known_orders, name_of
from merakc.schedules.timing import make_pipeline, run_orders


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of a step, and what they are made of; peak bytes of each pipeline rank.

    `recompute_s` are a rank's on average. `source` says whether measurements have told of the
    pieces, or formulas alone.
    """

    step_s: float
    pipeline_s: float
    state_s: float
    optimizer_s: float
    bubble_share: float
    recompute_s: float
    peak_bytes: tuple[int, ...]
    stages: tuple[StageCost, ...] = field(repr=False)
    source: Literal["formula", "measured"] = "formula"

    @property
    def idle_s(self) -> float:
        """Seconds of the step in which an average rank waits for others."""
        return self.pipeline_s * self.bubble_share


def estimate_step(
    pieces: Sequence[Piece],
    strategy: Strategy,
    hardware: Hardware,
    framework: Framework = PLAIN,
    corrections: Corrections = NONE,
    labels: Callable[[Piece], Sequence[str]] = lambda piece: (),
) -> Estimate:
    """One step of a model, as `make_job` lays it out, with the shards and the recomputation of the
    strategy.
    """
    job = make_job(pieces, strategy, hardware, framework, corrections, labels)
    return estimate_job(job, strategy.shards(0), strategy.recompute)


def estimate_job(
    job: Job,
    shards: StateShards = UNSHARDED,
    recompute: str = "none",
    of_state: tuple[float, float] | None = None,
) -> Estimate:
    """One step: the micro-batches in the order of the schedule; after them gradients are reduced
    over dp and over the holders of shared parameters, and the optimizer runs.

    With `recompute` "solved" each stage recomputes what its rank's memory does not hold, with
    "budget" its backwards do so block by block, of which those of "full" make all again. `of_state`
    are the `state_seconds`, where they are known.
    """
    run = _run(job, shards, recompute)
    state_s, optimizer_s = of_state or state_seconds(job, shards)
    pipeline_s, busy_s, sharing = run.seconds, run.busy_s, job.sharing
    if sharing is not None:  # all that ranks of a node do, they do with what they share
        together = min(job.strategy.world_size, sharing.devices)
        busy_s *= together / sharing.most(together)
        alike = min(job.strategy.lanes, sharing.devices)  # lanes compute at once
        pipeline_s = max(pipeline_s / sharing.speed(alike), busy_s)
    return Estimate(
        pipeline_s + state_s + optimizer_s,
        pipeline_s=pipeline_s,
        state_s=state_s,
        optimizer_s=optimizer_s,
        bubble_share=1.0 - busy_s / pipeline_s,
        recompute_s=run.again_s,
        peak_bytes=run.peak_bytes,
        stages=run.stages,
        source="measured" if all(cost.measured for cost in job.costs[0]) else "formula",
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """The micro-batches of a step: seconds, those that a rank is busy and recomputes on average,
    peak bytes of each, and the stages without recomputation.
    """

    seconds: float
    busy_s: float
    again_s: float
    peak_bytes: tuple[int, ...]
    stages: tuple[StageCost, ...]


def least_seconds(job: Job, shards: StateShards | None = None) -> float:
    """Seconds of a step's micro-batches at the least: in any order of work on these stages, with
    the least recomputation that leaves room for the state, if its shards are given.
    """
    costs = job.stages(shards or UNSHARDED)
    if shards is None:
        costs = [replace(cost, static_bytes=0) for cost in costs]
    pipeline = make_pipeline(job.rank_of, costs, job.strategy.micro_batches, _links(job))
    return lower_bound_s(pipeline, job.memory_bytes)


def shortest_seconds(job: Job) -> float:
    """The same where no memory is short."""
    costs = job.stages(UNSHARDED)
    pipeline = make_pipeline(job.rank_of, costs, job.strategy.micro_batches, _links(job))
    return lower_bound_s(pipeline, [math.inf] * job.strategy.pp)


def _links(job: Job) -> list[float]:
    """Seconds of a message from each stage to the next."""
    share, fabric = job.strategy.lanes if job.framework.split_messages else 1, job.links.fabric
    far = crossing(job.strategy.mesh, fabric.ranks_per_node)
    return [
        message_seconds(job.pieces[part[-1]].handed_bytes / share, fabric, is_local=pair not in far)
        for part, pair in zip(job.parts[:-1], pairwise(job.rank_of), strict=True)
    ]


def _run(job: Job, shards: StateShards, recompute: str) -> _Run:
    """Runs so many micro-batches that the rest of them take as long each as the last ones."""
    links, stages = _links(job), (whole := job.stages(shards))
    period, total = job.strategy.pp, job.strategy.micro_batches
    left = max(total - STEADY * period, 0) // period * period
    if job.framework.whole_batch:  # all are in memory at once
        left = 0
    again: tuple[int, ...] = ()
    if recompute in ("full", "stage"):
        again = tuple(range(len(stages)))
    if recompute in IN_BACKWARD:
        stages = [keep.within_backward(cost) for cost in job.stages(shards, by_block=True)]
        if recompute == "budget":
            flying = _orders(job, total - left).in_flight
            stages = keep.partly_again(job.rank_of, flying, whole, stages, job.memory_bytes)
    elif recompute == "solved":
        plain = _orders(job, total - left)
        kept = keep.shared_out(plain.rank_of, plain.in_flight, stages, job.memory_bytes)
        stages = [keep.with_kept(cost, size) for cost, size in zip(stages, kept, strict=True)]
        again = tuple(k for k, size in enumerate(kept) if size != keep.EVERYTHING)
    orders = _orders(job, total - left, again)
    seconds = _end_s(job, orders, stages, links)
    if left:
        fewer = _orders(job, total - left - period, again)
        seconds += left / period * (seconds - _end_s(job, fewer, stages, links))
    mean = total / period
    works = [cost.forward_s + cost.backward_s for cost in stages]
    for k in again:
        works[k] += stages[k].recompute_s
    again_s = sum(works) - sum(c.forward_s + c.backward_s for c in whole)
    of_ranks = [0.0] * period
    for rank, work_s in zip(job.rank_of, works, strict=True):
        of_ranks[rank] += work_s
    # No rank is done before its own work, which few micro-batches may not show.
    seconds = max(seconds, total * max(of_ranks))
    peak_bytes = orders.peak_bytes(stages)
    return _Run(seconds, mean * sum(works), mean * again_s, peak_bytes, tuple(whole))


def _end_s(
    job: Job, orders: KnownOrders, stages: Sequence[StageCost], links: Sequence[float]
) -> float:
    """The end of the last work."""
    pipeline = make_pipeline(orders.rank_of, stages, orders.micro_batches, links)
    key = orders, pipeline.seconds
    if key not in job.ends_s:
        ends = run_orders(pipeline, orders.works)
        assert ends is not None, "a known schedule ran into a deadlock"
        job.ends_s[key] = max(end[-1] for end in ends)
    return job.ends_s[key]


def _orders(job: Job, micro_batches: int, again: tuple[int, ...] = ()) -> KnownOrders:
    """The order of work of each rank, where these stages recompute."""
    strategy = job.strategy
    return known_orders(
        name_of(strategy), strategy.pp, micro_batches, strategy.chunks, again,
        whole_batch=job.framework.whole_batch,
    )  # fmt: skip


def state_seconds(job: Job, shards: StateShards) -> tuple[float, float]:
    """Seconds that gradients and parameters are waited for, and those of the optimizer.

    The rank with the most parameters is waited for, and the one with the slowest optimizer.
    """
    precision = job.framework.precision
    optimizer_s = max(
        optimizer_seconds(count, precision, place)
        for count, place in zip(job.owned(shards), job.places, strict=True)
    )
    over_dp_s = _dp_seconds(job, shards) if job.strategy.state_ranks > 1 else 0.0
    return over_dp_s + _tied_seconds(job), optimizer_s


def _dp_seconds(job: Job, shards: StateShards) -> float:
    """What the rank with the most parameters waits for collectives over dp."""
    strategy, framework, layers = job.strategy, job.framework, job.state_layers
    precision = framework.precision
    if framework.stagewise:
        layers = job.layers_in_buckets(shards)
        if shards.optimizer == 1:  # what is reduced whole travels in float32, or wider
            precision = replace(precision, gradient_bytes=max(4, precision.gradient_bytes))
    group = state_group(strategy.mesh, job.links.fabric, framework.overlap)
    return exposed_seconds(layers, strategy.micro_batches, shards, group, precision)


def _tied_seconds(job: Job) -> float:
    """What adding up the gradients of parameters takes that several stages hold."""
    fabric = job.links.fabric
    if not job.tied_parameters:
        return 0.0
    near = job.strategy.world_size <= fabric.ranks_per_node
    ends = Group(2, 2 if near else 1, fabric.ranks_per_node)
    tied_bytes = job.framework.precision.gradient_bytes * job.tied_parameters
    return all_reduce_seconds(tied_bytes, ends, fabric)
