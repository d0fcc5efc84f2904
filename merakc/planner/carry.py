"""A plan's decisions for other ranks, another batch, other machines or another model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from merakc.costs.device import place_on
from merakc.costs.ranks import rank_memory_bytes
from merakc.costs.work.keep import keep_bytes
from merakc.frontend.record import Recording
from merakc.ir.plan import Plan
from merakc.ir.precision import Precision
from merakc.ir.program import Mesh
from merakc.ir.state import StateShards
from merakc.lowering.lowered import Lowered, make_plan
from merakc.lowering.overlap import with_parts
from merakc.lowering.predict import planned_costs
from merakc.machines.cluster import NOMINAL_GPU, Cluster
from merakc.passes.overlap.async_collectives import stage_seconds


@dataclass(frozen=True, slots=True)
class Degrees:
    """The grid of ranks that a plan is carried to, and what each of them is given.

    `chunks` is the number of stages of a pipeline rank, `samples` that of a micro-batch, `shards`
    the number of shards over dp there for each that the plan has.
    """

    mesh: Mesh
    micro_batches: int
    samples: int
    chunks: int
    shards: Mapping[int, int]

    @property
    def stages(self) -> int:
        """Pipeline stages, all chunks of all ranks."""
        return self.mesh.pp * self.chunks


def carry_plan(
    plan: Plan,
    degrees: Degrees,
    record: Callable[[int], Recording],
    precision: Precision | None,
    cluster: Cluster | None = None,
) -> Lowered:
    """A plan with the same decisions for the model that `record` records.

    That gives the recording for a number of micro-batches of one dp rank's batch. Tensors are split
    and stages cut anew; all that a plan can be asked for is as in `plan`. Where each stage keeps
    what memory allows, that is the memory of `cluster`, or else half of what could be kept.

    Raises children of `MerakError` where the model does not allow it.
    """
    mesh, m = degrees.mesh, degrees.micro_batches
    machines = cluster or plan.machines or NOMINAL_GPU
    lowered = make_plan(
        record(m), mesh, m, machines, batch_size=m * degrees.samples, schedule=plan.schedule,
        order=plan.order, virtual_stages=degrees.chunks if degrees.chunks > 1 else None,
        recompute=plan.recompute, sequence_parallel=plan.sequence_parallel and mesh.tp > 1,
    )  # fmt: skip
    made = lowered.plan
    stages = len(made.rank_of)
    like = [s * len(plan.rank_of) // stages for s in range(stages)]  # the plan's stage of each
    if plan.state_shards and mesh.dp > 1:
        every = [[degrees.shards[n] for n in shard_counts(plan.shards(s))] for s in like]
        made = replace(made, state_shards=tuple(StateShards(*counts) for counts in every))
    made = replace(made, precision=precision)
    if plan.keep_bytes:
        made = replace(made, keep_bytes=_kept(plan, replace(lowered, plan=made), like, cluster))
    lowered = replace(lowered, plan=made)
    if plan.sub_batches and mesh.tp > 1:
        parts = tuple(plan.sub_batches[s] for s in like)
        given = plan.machines if cluster is None else _figures(cluster)
        chunks = {n: count for n, count in plan.row_chunks.items() if n in made.parameters}
        known = given is not None and given.symmetric_memory
        fused = tuple(n for n in plan.fused_products if known and n in made.parameters)
        parted = replace(
            made, sub_batches=parts, row_chunks=chunks, fused_products=fused, machines=given
        )
        lowered = _with_gains(with_parts(replace(lowered, plan=parted), record), machines)
    return lowered


def shard_counts(shards: StateShards) -> tuple[int, int, int]:
    """The numbers of shards of parameters, gradients and optimizer state."""
    return shards.parameters, shards.gradients, shards.optimizer


def _kept(
    plan: Plan, lowered: Lowered, like: list[int], cluster: Cluster | None
) -> tuple[int, ...]:
    """What each stage may keep of a micro-batch."""
    costs = planned_costs(lowered, cluster or plan.machines or NOMINAL_GPU)
    if cluster is not None:
        # Any number will do for the order of work; what it says is asked for.
        some = replace(lowered.plan, keep_bytes=(0,) * len(like))
        schedule = replace(lowered, plan=some).schedule
        return keep_bytes(schedule, costs, rank_memory_bytes(cluster, lowered.plan.mesh))
    half = [(c.checkpoint_bytes + c.saved_bytes) // 2 for c in costs]
    return tuple(b if plan.keep_bytes[s] >= 0 else -1 for b, s in zip(half, like, strict=True))


def _figures(cluster: Cluster) -> Cluster:
    """What of a cluster decides the order of nodes."""
    return replace(cluster, memory_bytes=0, hardware=None)


def _with_gains(lowered: Lowered, machines: Cluster) -> Lowered:
    """The same with the share of its seconds that each stage is expected to save by its parts."""
    gains, place = [], place_on(machines, lowered.plan.tp)
    for stage, whole in enumerate(lowered.stages.local):
        parted_s = stage_seconds(lowered.local(stage, 0), place)[0]
        gains.append(1 - parted_s / stage_seconds(whole, place)[1])
    return replace(lowered, plan=replace(lowered.plan, overlap_gains=tuple(gains)))
