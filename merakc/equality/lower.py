"""The degrees that a plan is checked on: few ranks, and everything that it decides."""

from __future__ import annotations

from dataclasses import replace

from merakc.errors import ConfigError
from merakc.files.printable import count_of
from merakc.ir.plan import Plan
from merakc.ir.program import Mesh
from merakc.ir.strategy import NO_EXPERTS, Strategy
from merakc.planner.carry import shards_like

# The least that splits at all.
DEGREE = 2
# Micro-batches a rank: a pipeline that is full for as long as it fills and drains.
MICRO_BATCHES = 2
SAMPLES = 2


def lower_strategy(plan: Plan, ranks: int) -> Strategy:
    """The strategy to check a plan with on at most so many ranks: its own where they suffice.

    Otherwise each degree is lowered to 2, but for dp, which has as many ranks as the plan has
    levels of shards, and for pp where the plan holds an order of work, which is for so many ranks.
    Raises `ConfigError` where there are fewer.
    """
    if ranks < (plan.pp if plan.order else 1):
        raise ConfigError(
            f"the plan's order of work is for {count_of(plan.pp, 'pipeline rank')}, and there are "
            f"{ranks}; give --ranks {plan.pp} or more"
        )
    levels, mesh = _levels(plan), plan.mesh
    shards = {n: n for n in levels}
    if mesh.world_size > ranks:
        pp = plan.pp if plan.order else min(plan.pp, DEGREE)
        mesh = Mesh(
            max(levels.values()), min(plan.tp, DEGREE), pp, cp=min(plan.cp, DEGREE),
            experts=plan.expert_parallel,
        )  # fmt: skip
        while mesh.world_size > ranks:
            mesh = _fewer(mesh)
        shards = {n: min(level, mesh.state_ranks) for n, level in levels.items()}
    micro_batches, chunks = plan.micro_batches, plan.chunks
    if not plan.order:
        enough = MICRO_BATCHES * mesh.pp
        micro_batches = enough if mesh.pp < plan.pp else min(plan.micro_batches, enough)
        chunks = min(chunks, DEGREE)
    samples = max(SAMPLES, *plan.sub_batches) if plan.sub_batches else SAMPLES
    lowered = plan.strategy.on(
        mesh, micro_batches=micro_batches, batch_size=micro_batches * samples, chunks=chunks,
        sequence_parallel=plan.sequence_parallel and mesh.tp > 1,
        **(NO_EXPERTS if mesh.cp == 1 else {}),
    )  # fmt: skip
    return shards_like(plan, lowered, shards)


def replicas(plan: Plan, strategy: Strategy, ranks: int) -> Strategy | None:
    """Two dp ranks alone, where a plan has several and this strategy has no place for them."""
    if plan.dp == 1 or strategy.dp > 1 or ranks < DEGREE:
        return None
    few = min(strategy.micro_batches, MICRO_BATCHES)
    alone = strategy.on(
        Mesh(dp=DEGREE), micro_batches=few, batch_size=few * strategy.samples, chunks=1,
        schedule="1f1b", order=(), sequence_parallel=False, **NO_EXPERTS,
    )  # fmt: skip
    return shards_like(plan, alone, {n: min(level, DEGREE) for n, level in _levels(plan).items()})


def lost(plan: Plan, *runs: Strategy) -> tuple[str, ...]:
    """What of a plan these runs leave out, because there are too few ranks for it."""
    missing = [
        f"{axis}={getattr(plan, axis)}"
        for axis in ("dp", "cp", "tp", "pp")
        if getattr(plan, axis) > 1 and all(getattr(run, axis) == 1 for run in runs)
    ]
    widest, levels = max(run.dp for run in runs), _levels(plan)
    if widest > 1 and len({min(level, widest) for level in levels.values()}) < len(levels):
        missing.append(f"shards of the state at more than {widest} ranks")
    return tuple(missing)


def _levels(plan: Plan) -> dict[int, int]:
    """The numbers of shards that the plan has, each with its power of two."""
    levels = sorted({1, plan.dp, *(n for s in plan.state_shards for n in s.counts)})
    return {n: 1 << k for k, n in enumerate(levels)}


def _fewer(mesh: Mesh) -> Mesh:
    """The mesh with the degree lowered that says least: replicas first, the pipeline last."""
    if mesh.dp > 1:
        return replace(mesh, dp=mesh.dp // 2)
    if mesh.tp > 1:
        return replace(mesh, tp=mesh.tp // 2)
    if mesh.cp > 1:
        return replace(mesh, cp=mesh.cp // 2)
    return replace(mesh, pp=1)
