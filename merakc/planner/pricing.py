"""What a strategy costs, from the pieces of its model: with the shards of its state and the
recomputation that suit it best; and before, what it costs at the least.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

from merakc.analysis.buckets import WORTH_SHARE, bucket_scales
from merakc.costs.device import collective_seconds, rank_place, total_flops
from merakc.costs.ranks import least_spare, rank_devices
from merakc.costs.stages import piece_cost
from merakc.costs.state import Precision
from merakc.costs.work.kernels import KernelKind
from merakc.costs.work.pieces import Piece
from merakc.ir.plan_checks import RECOMPUTE
from merakc.ir.state import AUTO, UNSHARDED, StateShards, coarse_lattice, parse_shards
from merakc.ir.strategy import Form, Strategy
from merakc.machines.cluster import Device, Hardware
from merakc.planner.estimate import (
    Estimate,
    estimate_job,
    least_seconds,
    shortest_seconds,
    state_seconds,
)
from merakc.planner.host_estimate import host_for, priced
from merakc.planner.job import Framework, Job, make_job
from merakc.planner.piece_table import PieceTable
from merakc.planner.request import Request
from merakc.report.units import format_bytes

# Ways to shard the state that are tried where something must be recomputed, the fastest first.
TRIED_WAYS = 3
# Kinds of recomputation that are tried where what is asked for is none of a plan's.
OPEN_RECOMPUTE = ("none", "budget", "solved")
# Planned in full a strategy may be so much faster than by pieces: estimates by pieces are off by up
# to 14 % where stages are few.
FAR = 1.15
IDLE = "idle pipeline ranks"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A strategy, with its state sharded and recomputed as suits it best, and what it costs."""

    strategy: Strategy
    estimate: Estimate
    seconds: dict[str, float]  # of the step, by what they go into
    flops: int  # of a micro-batch on one tp rank, forward and backward
    least_sample_s: float  # for each sample, planned in full

    @property
    def peak_bytes(self) -> int:
        """Of the fullest rank."""
        return max(self.estimate.peak_bytes)

    @property
    def sample_s(self) -> float:
        """Seconds of a step for each sample of the whole batch."""
        return self.estimate.step_s / self.strategy.total_batch_size


@dataclass(frozen=True, slots=True)
class Shortage:
    """That a strategy does not fit: what its rank of least spare memory needs at the least, or what
    its state alone takes.
    """

    need_bytes: int
    of_state: bool = False

    def __str__(self) -> str:
        size = format_bytes(self.need_bytes)
        return f"the state of a rank is {size}" if self.of_state else f"a rank needs {size}"


def job_of(table: PieceTable, strategy: Strategy, hardware: Hardware, precision: Precision) -> Job:
    """The pieces of a model on the stages of a strategy, as merakc's runtime runs them."""
    overlap = hardware.beside(strategy.world_size)
    framework = Framework(precision, overlap, stagewise=True, whole_batch=table.couples)
    pieces = table.pieces(strategy.form, strategy.samples)
    return make_job(pieces, strategy, hardware, framework)


@dataclass
class Bounds:
    """Seconds a sample that no order of work can beat: no stage longer than others, and nothing
    waited for but a rank's first work.
    """

    table: PieceTable
    hardware: Hardware
    known: dict[tuple[Form, int, Device], tuple[float, list[float]]] = field(default_factory=dict)

    def of(self, strategy: Strategy) -> float:
        """Of one strategy: as if each rank were as much faster than the first as in the piece of
        which that holds most. The last rank's first work waits for forwards on all others.
        """
        devices = rank_devices(self.hardware, strategy.mesh)
        forward_s, seconds = self._seconds(strategy, devices[0])
        speeds = {
            device: max(
                (
                    a / b
                    for a, b in zip(seconds, self._seconds(strategy, device)[1], strict=True)
                    if b
                ),
                default=1.0,
            )
            for device in dict.fromkeys(devices)
        }
        total_s = sum(seconds)
        step_s = strategy.micro_batches * total_s / sum(speeds[device] for device in devices)
        before = (strategy.pp - 1) / strategy.stage_count
        step_s += before * forward_s / max(speeds.values())
        return step_s / strategy.total_batch_size

    def _seconds(self, strategy: Strategy, device: Device) -> tuple[float, list[float]]:
        """Of a micro-batch's forward on one device, and of each piece."""
        key = strategy.form, strategy.samples, device
        if key not in self.known:
            ranks, (tp, cp) = len(self.hardware.devices), (strategy.tp, strategy.cp)
            place = rank_place(self.hardware, ranks, tp, cp=cp, device=device)
            pieces = self.table.pieces(strategy.form, strategy.samples)
            costs = {k: piece_cost(p, place) for k, p in {id(p): p for p in pieces}.items()}
            each = [costs[id(piece)] for piece in pieces]
            seconds = [cost.forward_s + cost.backward_s for cost in each]
            self.known[key] = sum(cost.forward_s for cost in each), seconds
        return self.known[key]


@dataclass(frozen=True)
class Outlook:
    """A strategy before its memory is looked at: its pieces on their stages, with the
    `state_seconds` of each way to shard its state, and its step as if all of it fitted, which
    nothing that is recomputed makes shorter. No order of work makes it shorter than `ordered_s`,
    where one would be made for it.
    """

    job: Job
    waits: Mapping[StateShards, tuple[float, float]]
    estimate: Estimate
    ordered_s: float

    @property
    def strategy(self) -> Strategy:
        """What it is of."""
        return self.job.strategy

    @property
    def sample_s(self) -> float:
        """Seconds of a step for each sample of the whole batch, at the least."""
        return self.estimate.step_s / self.strategy.total_batch_size

    @property
    def in_full_s(self) -> float:
        """The same planned in full, which may be so much faster than by pieces."""
        least_s = min(self.estimate.step_s, self.ordered_s)
        return least_s / FAR / self.strategy.total_batch_size


def shortest_sample_s(job: Job) -> float:
    """Seconds a sample at the least by the pieces: no memory is short, and no state waited for."""
    if job.sharing is not None:  # of what ranks share orders of work say less
        return 0.0
    return shortest_seconds(job) / job.strategy.total_batch_size


def outlook_of(job: Job, request: Request, hardware: Hardware) -> Outlook:
    """The strategy with its state sharded as is waited for least, in buckets as large as pays."""
    strategy = job.strategy
    run = estimate_job(job, UNSHARDED, "none", (0.0, 0.0))
    ways, leanest = state_choices(request, job, hardware), None
    if host_for(request.offload, hardware) is None:
        ways = [one for one in ways if holds(job, one)] or ways
        leanest = min(ways, key=lambda one: max(job.state_bytes(one)))
    waits = dict(in_good_buckets(job, one, run.step_s) for one in ways)
    state_s, optimizer_s = min(waits.values(), key=sum)
    step_s = run.step_s + state_s + optimizer_s
    estimate = replace(run, step_s=step_s, state_s=state_s, optimizer_s=optimizer_s)
    ordered_s = step_s
    if request.makes_orders and strategy.pp > 1:
        ordered_s = least_seconds(job, leanest) + state_s + optimizer_s
    return Outlook(job, waits, estimate, ordered_s)


def holds(job: Job, shards: StateShards) -> bool:
    """Whether the ranks have room for their state."""
    return all(map(operator.lt, job.state_bytes(shards), job.memory_bytes))


def price(outlook: Outlook, request: Request, hardware: Hardware) -> Candidate | Shortage:
    """The strategy with the shards and the recomputation that suit it best, or why it cannot be."""
    job, asked = outlook.job, request.recompute
    kinds = (asked,) if asked in RECOMPUTE else OPEN_RECOMPUTE
    fit = partial(_fitting, waits=outlook.waits, kinds=kinds)
    fitting, offload = priced(request.offload, job, hardware, fit)
    if isinstance(fitting, Shortage):
        return fitting
    best, recompute, estimate = min(fitting, key=lambda one: one[2].step_s)
    shards = (best,) * len(job.parts)
    decided = replace(job.strategy, recompute=recompute, state_shards=shards, offload=offload)
    seconds, flops = _seconds(job, estimate), _flops(job.pieces)
    return Candidate(decided, estimate, seconds, flops, least_sample_s=outlook.in_full_s)


def in_good_buckets(
    job: Job, shards: StateShards, least_s: float
) -> tuple[StateShards, tuple[float, float]]:
    """The shards in buckets as large as pays, and their `state_seconds`; of a step that takes
    `least_s` seconds at the least.
    """
    found, waits = shards, state_seconds(job, shards)
    held_bytes = job.framework.precision.kept_bytes * max(job.rank_parameters)
    for scale in bucket_scales(held_bytes)[1:] if shards.optimizer > 1 else ():
        if waits[0] <= WORTH_SHARE * least_s:
            break
        larger = replace(shards, bucket_scale=scale)
        found, waits = min((found, waits), (larger, state_seconds(job, larger)), key=lambda w: w[1])
    return found, waits


def _fitting(
    job: Job, waits: Mapping[StateShards, tuple[float, float]], kinds: Sequence[str]
) -> list[tuple[StateShards, str, Estimate]] | Shortage:
    """What fits of these kinds of recomputation, the least first, with the shards that are waited
    for least; nothing more is recomputed where the fastest shards fit.
    """
    ways = sorted(waits, key=lambda one: sum(waits[one]))
    if job.fetches:
        ways = [way for way in ways if way.updates_what_it_keeps] or ways
    held, memory = [job.state_bytes(way) for way in ways], job.memory_bytes
    of_state = least = min(_need(sizes, memory) for sizes in held)
    fitting: list[tuple[StateShards, str, Estimate]] = []

    @cache
    def estimated(way: StateShards, recompute: str) -> Estimate:
        return estimate_job(job, way, recompute, waits[way])

    for recompute in kinds:
        open_ways = [k for k, way in enumerate(ways) if holds(job, way)]
        if recompute == "none" and open_ways:
            kept = estimated(ways[0], recompute)
            others = [peak - sizes for peak, sizes in zip(kept.peak_bytes, held[0], strict=True)]
            peaks = [[a + b for a, b in zip(others, sizes, strict=True)] for sizes in held]
            open_ways = [k for k in open_ways if all(map(operator.le, peaks[k], memory))][:1]
            least = max(least, min(_need(sizes, memory) for sizes in peaks))
        for way in (ways[k] for k in open_ways[:TRIED_WAYS]):
            estimate = estimated(way, recompute)
            if recompute != "none":
                least = min(least, _need(estimate.peak_bytes, memory))
            if all(map(operator.le, estimate.peak_bytes, memory)):
                fitting.append((way, recompute, estimate))
        if any(way == ways[0] for way, *_ in fitting):
            break
    return fitting or Shortage(least, of_state=least == of_state)


def _need(peak_bytes: Sequence[int], memory_bytes: Sequence[int]) -> int:
    """What the rank needs that has least to spare."""
    return peak_bytes[least_spare(peak_bytes, memory_bytes)]


def state_choices(request: Request, job: Job, hardware: Hardware) -> list[StateShards]:
    """Those asked for; else those over no ranks, the ranks of a node and all of dp and cp."""
    mesh, asked = job.strategy.mesh, request.state_shards
    if asked is not None and asked != AUTO:
        return [parse_shards(asked, mesh.state_ranks, len(job.parts))[0]]
    inside = hardware.nodes[0].devices // mesh.state_stride
    return list(coarse_lattice(mesh.state_ranks, inside))


def _seconds(job: Job, estimate: Estimate) -> dict[str, float]:
    """What the seconds of a step go into, on an average rank."""
    unique = {id(piece): piece for piece in job.pieces}
    wires = {
        key: sum(
            count * collective_seconds(kernel, job.links)
            for work in (piece.work.forward, piece.work.backward)
            for kernel, count in work.items()
            if kernel.kind is KernelKind.COLLECTIVE
        )
        for key, piece in unique.items()
    }
    tp_s = sum(wires[id(p)] for p in job.pieces) * job.strategy.micro_batches / job.strategy.pp
    rest_s = estimate.pipeline_s - estimate.idle_s - tp_s - estimate.recompute_s
    return {
        "arithmetic": rest_s, IDLE: estimate.idle_s, "tp communication": tp_s,
        "recomputation": estimate.recompute_s, "waiting for dp": estimate.state_s,
        "optimizer": estimate.optimizer_s,
    }  # fmt: skip


def _flops(pieces: Sequence[Piece]) -> int:
    """Those of a micro-batch on one tp rank, forward and backward."""
    flops = {
        key: total_flops(piece.work.forward) + total_flops(piece.work.backward)
        for key, piece in {id(piece): piece for piece in pieces}.items()
    }
    return sum(flops[id(piece)] for piece in pieces)
