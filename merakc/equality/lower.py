"""The degrees that a plan is checked on: few ranks, and everything that it decides."""

from __future__ import annotations

from dataclasses import replace

from merakc.carry import Degrees, shard_counts
from merakc.errors import ConfigError
from merakc.ir.plan import Plan
from merakc.ir.program import Mesh

# The least that splits at all.
DEGREE = 2
# Micro-batches a rank: a pipeline that is full for as long as it fills and drains.
MICRO_BATCHES = 2
SAMPLES = 2


def lower_degrees(plan: Plan, ranks: int) -> Degrees:
    """The degrees to check a plan with on at most so many ranks: its own where they suffice.

    Otherwise each is lowered to 2, but for dp, which has as many as the plan has levels of shards,
    and for pp where the plan holds an order of work, which is for so many ranks. Raises
    `ConfigError` where there are fewer.
    """
    if ranks < (plan.pp if plan.order else 1):
        raise ConfigError(
            f"the plan's order of work is for {plan.pp} pipeline ranks, and there are {ranks}; "
            f"give --ranks {plan.pp} or more"
        )
    levels = sorted({1, plan.dp, *(n for s in plan.state_shards for n in shard_counts(s))})
    mesh = plan.mesh
    if mesh.world_size > ranks:
        pp = plan.pp if plan.order else min(plan.pp, DEGREE)
        mesh = Mesh(1 << (len(levels) - 1), min(plan.tp, DEGREE), pp)
        while mesh.world_size > ranks:
            mesh = _fewer(mesh)
        shards = {n: min(1 << k, mesh.dp) for k, n in enumerate(levels)}
    else:
        shards = {n: n for n in levels}
    micro_batches = plan.micro_batches
    if not plan.order:
        enough = MICRO_BATCHES * mesh.pp
        micro_batches = enough if mesh.pp < plan.pp else min(plan.micro_batches, enough)
    chunks = len(plan.rank_of) // plan.pp
    if not plan.order:
        chunks = min(chunks, DEGREE)
    samples = max(SAMPLES, *plan.sub_batches) if plan.sub_batches else SAMPLES
    return Degrees(mesh, micro_batches, samples, chunks, shards)


def lost(plan: Plan, degrees: Degrees) -> tuple[str, ...]:
    """What of a plan the check leaves out, because there are too few ranks for it."""
    mesh = degrees.mesh
    pairs = (("dp", plan.dp, mesh.dp), ("tp", plan.tp, mesh.tp), ("pp", plan.pp, mesh.pp))
    found = [f"{name}={before}" for name, before, now in pairs if before > 1 and now == 1]
    if mesh.dp > 1 and len(set(degrees.shards.values())) < len(degrees.shards):
        found.append(f"shards of the state at more than {mesh.dp} ranks")
    return tuple(found)


def _fewer(mesh: Mesh) -> Mesh:
    """The mesh with the degree lowered that says least: replicas first, the pipeline last."""
    if mesh.dp > 1:
        return replace(mesh, dp=mesh.dp // 2)
    if mesh.tp > 1:
        return replace(mesh, tp=mesh.tp // 2)
    return replace(mesh, pp=1)
