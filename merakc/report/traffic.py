"""What ranks tell each other in a step, axis by axis: bytes, seconds, and how much they wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from merakc.analysis.buckets import BucketSpec
from merakc.costs.buckets import tied_seconds
from merakc.costs.head import gather_seconds, gathered_bytes
from merakc.costs.work.kernels import Kernel
from merakc.ir.precision import Precision
from merakc.ir.program import ActionKind, CollectiveKind
from merakc.ir.report import AxisTraffic
from merakc.lowering.lowered import Lowered
from merakc.lowering.overlap import overlap_gains
from merakc.lowering.predict import tied_bytes
from merakc.machines.cluster import Cluster
from merakc.report.attribution import Attribution
from merakc.simulation.simulate import Simulation


def ring_bytes(size_bytes: float, ranks: int) -> float:
    """What a rank sends to gather `size_bytes`, or to scatter them (Patarasuk and Yuan 2009)."""
    return size_bytes * (ranks - 1) / ranks


def traffic(
    lowered: Lowered, cluster: Cluster, simulation: Simulation, found: Attribution
) -> tuple[AxisTraffic, ...]:
    """The communication of each axis of more than one rank."""
    plan = lowered.plan
    every: list[AxisTraffic] = []
    if plan.lanes > 1:
        every.append(_busiest([_over_tp(lowered, rank, found) for rank in range(plan.pp)]))
    if plan.pp > 1:
        every.append(_busiest(_over_pp(lowered, cluster, simulation)))
    if plan.state_ranks > 1:
        every.append(_over_dp(lowered, simulation))
    if plan.host_parameters:
        every.append(_busiest([_from_host(lowered, simulation, r) for r in range(plan.pp)]))
    if plan.dp > 1:
        every += _for_head(lowered, cluster)
    return tuple(every)


def _busiest(ranks: Sequence[AxisTraffic]) -> AxisTraffic:
    return max(ranks, key=lambda t: (t.seconds, t.sent_bytes))


def _over_tp(lowered: Lowered, rank: int, found: Attribution) -> AxisTraffic:
    """Collectives of the graphs. What running them under computation saves counts as hidden."""
    plan, gains = lowered.plan, overlap_gains(lowered)
    sent = seconds = saved_s = 0.0
    for stage in (s for s, holder in enumerate(plan.rank_of) if holder == rank):
        gain = gains[stage] if gains else 0.0
        spent = found.step_spent(stage).values()
        seconds += sum(s.forward_wire_s + s.backward_wire_s for s in spent) / (1.0 - gain)
        saved_s += sum(s.forward_s + s.backward_s for s in spent) * gain / (1.0 - gain)
        runs = found.runs[stage][ActionKind.FORWARD]
        for kernel, count in found.stages[stage].collectives.items():
            sent += runs * count * _wire_bytes(kernel, plan.cp if kernel.axis == "cp" else plan.tp)
    exposed_s = min(max(seconds - saved_s, 0.0), seconds)
    return AxisTraffic(
        cast(Any, plan.form.axes), plan.lanes, "collectives of the graphs", rank=rank,
        sent_bytes=round(sent), seconds=seconds, exposed_s=exposed_s,
    )  # fmt: skip


def _wire_bytes(kernel: Kernel, tp: int) -> float:
    times = 2 if "all_reduce" in kernel.op else 1
    return times * ring_bytes(kernel.traffic_bytes, tp)


def _over_pp(lowered: Lowered, cluster: Cluster, simulation: Simulation) -> list[AxisTraffic]:
    """Messages that a rank receives; it waits for what is on its way when it is ready.

    The gradients of tied parameters, which ranks add up in the end, hide behind nothing.
    """
    plan = lowered.plan
    found = []
    for place in range(plan.pp):
        rank = plan.mesh.rank(0, place, 0)
        received = [m for m in simulation.messages if m.receiver == rank]
        seconds = sum(m.arrives_s - m.sent_s for m in received)
        exposed_s = sum(m.exposed_s for m in received)
        sent = float(sum(m.size_bytes for m in simulation.messages if m.sender == rank))
        for stage in (s for s, holder in enumerate(plan.rank_of) if holder == place):
            shared = tied_bytes(plan, lowered.stages.local[stage], stage)
            tied_s = tied_seconds(shared, plan.mesh, cluster)
            seconds, exposed_s = seconds + tied_s, exposed_s + tied_s
            sent += sum(2 * ring_bytes(size, ranks) for ranks, size in shared.items())
        what = "activations and their gradients"
        tied = any(len({plan.rank_of[s] for s in held}) > 1 for held in plan.parameters.values())
        what += ", tied gradients" if tied else ""
        found.append(
            AxisTraffic(
                "pp",
                plan.pp,
                what,
                rank=place,
                sent_bytes=round(sent),
                seconds=seconds,
                exposed_s=exposed_s,
            )
        )
    return found


def _over_dp(lowered: Lowered, simulation: Simulation) -> AxisTraffic:
    """Collectives of buckets, which run beside the computes."""
    plan, communication_s = lowered.plan, simulation.communication_s
    place = max(range(plan.pp), key=communication_s.__getitem__)
    buckets = {b.name: b for b in lowered.buckets[place]}
    sent = 0.0
    for event in simulation.collectives:
        if event.rank == plan.mesh.rank(0, place, 0):
            kind, _, name = event.label.partition(" ")
            kind_of = CollectiveKind(kind)
            ranks = plan.dp if buckets[name].of_experts else plan.state_ranks
            sent += bucket_bytes(buckets[name], kind_of, ranks, plan.precision)
    sharded = any(s.optimizer > 1 for s in plan.state_shards)
    what = "gradients reduced, parameters gathered" if sharded else "gradients reduced"
    exposed_s = simulation.exposed_s[place]
    beside = " x ep" if plan.expert_parallel else " x cp" * (plan.cp > 1)
    return AxisTraffic(
        cast(Any, f"dp{beside}"),
        plan.state_ranks,
        what,
        rank=place,
        sent_bytes=round(sent),
        seconds=communication_s[place],
        exposed_s=exposed_s,
    )


def _from_host(lowered: Lowered, simulation: Simulation, place: int) -> AxisTraffic:
    """Parameters that a rank fetches, beside its computes."""
    plan, seconds, sent = lowered.plan, 0.0, 0
    buckets = {f"{CollectiveKind.GATHER} {b.name}": b for b in lowered.buckets[place] if b.fetched}
    for event in simulation.collectives:
        if event.rank == plan.mesh.rank(0, place, 0) and event.label in buckets:
            spec = buckets[event.label]
            computed = spec.dtype
            if plan.precision and spec.is_trained:
                computed = plan.precision.dtype("compute")
            seconds += event.end_s - event.start_s
            sent += computed.itemsize * spec.numel // spec.shards.parameters
    exposed_s = min(seconds, simulation.exposed_s[place])
    return AxisTraffic(
        "host", 1, "parameters fetched", place,
        sent_bytes=sent, seconds=seconds, exposed_s=exposed_s,
    )  # fmt: skip


def _for_head(lowered: Lowered, cluster: Cluster) -> list[AxisTraffic]:
    """What dp ranks tell each other of their samples, where the loss couples them."""
    plan, head, stage = lowered.plan, lowered.loss.head, lowered.head_stage
    if head is None or stage is None:
        return []
    rank, seconds = plan.rank_of[stage], gather_seconds(head, plan.mesh, cluster)
    sent = round(ring_bytes(gathered_bytes(head, plan.dp), plan.dp))
    return [
        AxisTraffic(
            "dp",
            plan.dp,
            "values of samples",
            rank=rank,
            sent_bytes=sent,
            seconds=seconds,
            exposed_s=seconds,
        )
    ]


def bucket_bytes(
    spec: BucketSpec, kind: CollectiveKind, ranks: int, precision: Precision | None
) -> float:
    """What a rank sends of a bucket, in the groups of `merakc.costs.state.collective_seconds`."""
    shards, numel = spec.shards, spec.numel
    computed = precision.dtype("compute") if precision and spec.is_trained else spec.dtype
    gradient = precision.dtype("gradients") if precision else spec.dtype
    if shards.optimizer == 1:
        gradient = torch.promote_types(gradient, torch.float32)
    held, summed = computed.itemsize * numel, gradient.itemsize * numel
    scattered = ring_bytes(summed, shards.gradients)
    match kind:
        case CollectiveKind.REFRESH:
            ranks = shards.optimizer // shards.parameters
            return ring_bytes(held / shards.parameters, ranks)
        case CollectiveKind.GATHER:
            return ring_bytes(held, shards.parameters)
        case CollectiveKind.SCATTER:
            return scattered
        case CollectiveKind.REDUCE:
            inner = ring_bytes(summed / shards.gradients, shards.optimizer // shards.gradients)
            replicas = ranks // shards.optimizer
            return scattered + inner + 2 * ring_bytes(summed / shards.optimizer, replicas)
        case CollectiveKind.WAIT:
            return 0.0
