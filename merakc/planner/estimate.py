"""The seconds of a step from the pieces of a model: in milliseconds, with no graph of any stage.

What thousands of candidates are compared by. The orders of work are those that the runtime runs;
only their costs come from pieces in place of the stages' own graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal

from merakc.costs.device import Place, rank_place
from merakc.costs.fabric import Group, all_reduce_seconds, message_seconds
from merakc.costs.measured import NONE, Corrections
from merakc.costs.pipeline_links import crossing
from merakc.costs.ranks import rank_devices, reserved_bytes
from merakc.costs.stages import (
    PieceCost,
    balanced_stages,
    even_stages,
    layers_of,
    optimizer_seconds,
    parameter_layers,
    piece_cost,
    shared_parameters,
    stage_costs,
    stage_parameters,
)
from merakc.costs.state import (
    MIXED,
    STEADY,
    DpGroup,
    Layer,
    Precision,
    exposed_seconds,
    in_buckets,
    state_bytes,
)
from merakc.costs.work import keep
from merakc.costs.work.pieces import Piece
from merakc.ir.costs import StageCost
from merakc.ir.recompute import IN_BACKWARD
from merakc.ir.state import UNSHARDED, StateShards
from merakc.ir.strategy import Strategy
from merakc.machines.cluster import Device, Hardware, Sharing
from merakc.schedules.bound import lower_bound_s
from merakc.schedules.known_orders import KnownOrders, known_orders, name_of, rank_of
from merakc.schedules.timing import make_pipeline, run_orders


@dataclass(frozen=True, slots=True)
class Framework:
    """How what trains runs a strategy, as far as the seconds of a step depend on it.

    With `stagewise`, as merakc's runtime has it, the longest stage is as short as it can be, and a
    recomputation starts from what the stage has received; without, blocks are spread evenly and
    each is recomputed from what enters it. `overlap` is the share of its speed at which
    communication of gradients and parameters runs under computing; 0 waits for all of it. With
    `split_messages` each tp rank sends its part of a message alone, and the parts are gathered in
    the node (Narayanan et al. 2021, section 4.1). With `tp_overlap` the collectives of tp run
    beside the products that they belong to. With `whole_batch` backwards wait for all forwards, as
    a loss that couples samples makes them. `precision` are the bytes of a parameter's state.
    """

    precision: Precision = MIXED
    overlap: float = 0.0
    split_messages: bool = False
    tp_overlap: bool = False
    stagewise: bool = False
    whole_batch: bool = False


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


@dataclass(frozen=True)
class Job:
    """A model's pieces on the stages of a strategy, with their seconds.

    `places` and `costs`, those of all pieces there, are each pipeline rank's; `parts` are the
    places of each stage's pieces. `sharing` is what the ranks of a node share. What the strategy
    says of the state's shards and of recomputation changes none of this.
    """

    pieces: Sequence[Piece]
    strategy: Strategy
    framework: Framework
    places: Sequence[Place]
    costs: Sequence[Sequence[PieceCost]]
    parts: Sequence[Sequence[int]]
    sharing: Sharing | None = None

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """The pipeline rank of each stage."""
        return rank_of(self.strategy)

    @property
    def links(self) -> Place:
        """Any rank's place, for the links that all have alike."""
        return self.places[0]

    @cached_property
    def rank_pieces(self) -> list[list[int]]:
        """The places of each pipeline rank's pieces."""
        held: list[list[int]] = [[] for _ in range(self.strategy.pp)]
        for part, rank in zip(self.parts, self.rank_of, strict=True):
            held[rank] += part
        return held

    @cached_property
    def rank_parameters(self) -> list[int]:
        """The trained elements of each pipeline rank."""
        return [stage_parameters([self.pieces[k] for k in held]) for held in self.rank_pieces]

    @cached_property
    def tied_parameters(self) -> int:
        """The elements that several stages hold."""
        return sum(shared_parameters(self.pieces, self.parts).values())

    @cached_property
    def state_layers(self) -> list[Layer]:
        """What the rank with the most parameters has: each of them, or the pieces as they are."""
        most = self.rank_parameters.index(max(self.rank_parameters))
        places, costs = self.rank_pieces[most], self.costs[most]
        each = parameter_layers if self.framework.stagewise else layers_of
        return each([self.pieces[k] for k in places], [costs[k] for k in places])

    @cached_property
    def stage_parameters(self) -> list[int]:
        """The trained elements of each stage."""
        return [stage_parameters([self.pieces[k] for k in part]) for part in self.parts]

    @cached_property
    def _stages(self) -> list[StageCost]:
        return self._priced(stagewise=self.framework.stagewise)

    @cached_property
    def _by_block(self) -> list[StageCost]:
        return self._priced(stagewise=False)

    def _priced(self, *, stagewise: bool) -> list[StageCost]:
        return [
            cost
            for part, rank in zip(self.parts, self.rank_of, strict=True)
            for cost in stage_costs(
                self.pieces, self.costs[rank], [part], self.places[rank],
                precision=self.framework.precision, stagewise=stagewise,
                gradients=self.framework.stagewise,
            )
        ]  # fmt: skip

    def stages(self, shards: StateShards, *, by_block: bool = False) -> list[StageCost]:
        """The costs of the stages, of which only the bytes of their state depend on the shards;
        `by_block` of such as make blocks again from what enters each.
        """
        costs = self._by_block if by_block else self._stages
        return [
            replace(cost, static_bytes=state_bytes(count, shards, self.framework.precision))
            for cost, count in zip(costs, self.stage_parameters, strict=True)
        ]

    def state_bytes(self, shards: StateShards) -> list[int]:
        """What each pipeline rank holds between two steps."""
        return [state_bytes(n, shards, self.framework.precision) for n in self.rank_parameters]

    @property
    def memory_bytes(self) -> list[int]:
        """What each pipeline rank has for its tensors."""
        devices, mesh = [place.device for place in self.places], self.strategy.mesh
        return [device.memory_bytes - reserved_bytes(device, mesh) for device in devices]


def make_job(
    pieces: Sequence[Piece],
    strategy: Strategy,
    hardware: Hardware,
    framework: Framework = Framework(),
    corrections: Corrections = NONE,
    labels: Callable[[Piece], Sequence[str]] = lambda piece: (),
) -> Job:
    """Times pieces on `strategy.world_size` neighbouring devices and spreads them over stages.

    `pieces` are of one tp rank and micro-batch; equal blocks may be one value many times.
    """
    devices = rank_devices(hardware, strategy.mesh)
    places = {
        device: rank_place(
            hardware, strategy.world_size, strategy.tp, overlap=framework.tp_overlap, device=device
        )
        for device in dict.fromkeys(devices)
    }
    costs: dict[Device, list[PieceCost]] = {}
    unique = {id(piece): piece for piece in pieces}
    for device, place in places.items():
        known = {k: piece_cost(p, place, corrections, labels(p)) for k, p in unique.items()}
        costs[device] = [known[id(piece)] for piece in pieces]
    on_ranks = [costs[device] for device in devices]
    if framework.stagewise:
        parts = balanced_stages([on_ranks[rank] for rank in rank_of(strategy)])
    else:
        parts = even_stages(pieces, (), strategy.stage_count)
    of_ranks = [places[device] for device in devices]
    return Job(
        pieces, strategy, framework, of_ranks, costs=on_ranks, parts=parts, sharing=hardware.sharing
    )


def estimate_step(
    pieces: Sequence[Piece],
    strategy: Strategy,
    hardware: Hardware,
    framework: Framework = Framework(),
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
        pipeline_s = max(pipeline_s, busy_s)
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


def _links(job: Job) -> list[float]:
    """Seconds of a message from each stage to the next."""
    share, fabric = job.strategy.tp if job.framework.split_messages else 1, job.links.fabric
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
    seconds = _end_s(orders, stages, links)
    if left:
        fewer = _orders(job, total - left - period, again)
        seconds += left / period * (seconds - _end_s(fewer, stages, links))
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


def _end_s(orders: KnownOrders, stages: Sequence[StageCost], links: Sequence[float]) -> float:
    """The end of the last work."""
    pipeline = make_pipeline(orders.rank_of, stages, orders.micro_batches, links)
    ends = run_orders(pipeline, orders.works)
    assert ends is not None, "a known schedule ran into a deadlock"
    return max(end[-1] for end in ends)


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
        optimizer_seconds(-(-count // shards.optimizer), precision, place)
        for count, place in zip(job.rank_parameters, job.places, strict=True)
    )
    over_dp_s = _dp_seconds(job, shards) if job.strategy.state_ranks > 1 else 0.0
    return over_dp_s + _tied_seconds(job), optimizer_s


def _dp_seconds(job: Job, shards: StateShards) -> float:
    """What the rank with the most parameters waits for collectives over dp."""
    strategy, framework, layers = job.strategy, job.framework, job.state_layers
    precision = framework.precision
    if framework.stagewise:
        layers = in_buckets(layers, precision.kept_bytes, shards)
        if shards.optimizer == 1:  # what is reduced whole travels in float32, or wider
            precision = replace(precision, gradient_bytes=max(4, precision.gradient_bytes))
    mesh, fabric = strategy.mesh, job.links.fabric
    group = DpGroup(mesh.state_ranks, fabric, mesh.state_stride, framework.overlap)
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
