"""The degrees that a plan is checked on: few ranks, and everything that it decides."""

from __future__ import annotations

from dataclasses import replace

from merakc.errors import ConfigError
from merakc.ir.plan import Plan
from merakc.ir.program import Mesh
from merakc.planner.carry import Degrees, shard_counts

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
    levels, mesh = _levels(plan), plan.mesh
    if mesh.world_size > ranks:
        pp = plan.pp if plan.order else min(plan.pp, DEGREE)
        mesh = Mesh(max(levels.values()), min(plan.tp, DEGREE), pp)
        while mesh.world_size > ranks:
            mesh = _fewer(mesh)
        shards = {n: min(own, mesh.dp) for n, own in levels.items()}
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


def replicas(plan: Plan, degrees: Degrees, ranks: int) -> Degrees | None:
    """Two dp ranks alone, where a plan has several and these degrees have no place for them."""
    if plan.dp == 1 or degrees.mesh.dp > 1 or ranks < DEGREE:
        return None
    shards = {n: min(own, DEGREE) for n, own in _levels(plan).items()}
    few = min(degrees.micro_batches, MICRO_BATCHES)
    return Degrees(Mesh(dp=DEGREE), few, degrees.samples, 1, shards)


def lost(plan: Plan, *runs: Degrees) -> tuple[str, ...]:
    """What of a plan these runs leave out, because there are too few ranks for it."""
    found = [
        f"{axis}={getattr(plan, axis)}"
        for axis in ("dp", "tp", "pp")
        if getattr(plan, axis) > 1 and all(getattr(d.mesh, axis) == 1 for d in runs)
    ]
    widest = max(runs, key=lambda d: d.mesh.dp)
    if widest.mesh.dp > 1 and len(set(widest.shards.values())) < len(widest.shards):
        found.append(f"shards of the state at more than {widest.mesh.dp} ranks")
    return tuple(found)


def _levels(plan: Plan) -> dict[int, int]:
    """The numbers of shards that the plan has, each with its power of two."""
    levels = sorted({1, plan.dp, *(n for s in plan.state_shards for n in shard_counts(s))})
    return {n: 1 << k for k, n in enumerate(levels)}


def _fewer(mesh: Mesh) -> Mesh:
    """The mesh with the degree lowered that says least: replicas first, the pipeline last."""
    if mesh.dp > 1:
        return replace(mesh, dp=mesh.dp // 2)
    if mesh.tp > 1:
        return replace(mesh, tp=mesh.tp // 2)
    return replace(mesh, pp=1)
