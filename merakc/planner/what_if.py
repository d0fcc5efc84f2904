"""What a plan would cost with another batch, on other machines, or at other degrees."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch

from merakc.batches.split import call_arguments
from merakc.errors import ConfigError
from merakc.frontend.record import Recording
from merakc.ir.batches import BatchLayout
from merakc.ir.plan import Plan
from merakc.ir.plan_checks import MOST
from merakc.ir.plan_file import PlanFile
from merakc.ir.program import Mesh
from merakc.lowering.lowered import Lowered, apply_plan
from merakc.lowering.predict import predict
from merakc.lowering.recording import record_part
from merakc.machines.cluster import Cluster
from merakc.planner.carry import Degrees, carry_plan
from merakc.planner.sources import Source
from merakc.schedules.registry import stage_ranks


@dataclass(frozen=True, slots=True)
class Changes:
    """What is to be otherwise; None stays. `batch` counts samples over all ranks."""

    batch: int | None = None
    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    micro_batches: int | None = None
    schedule: str | None = None


def simulated(
    plan: Plan, source: Source, cluster: Cluster, progress: Callable[[str], None] = lambda _: None
) -> PlanFile:
    """The plan with what it costs on a cluster. Raises `PlanError` where it is of another model."""
    lowered = applied(plan, source, progress)
    progress("simulating the plan")
    return _predicted(lowered, cluster)


def applied(
    plan: Plan, source: Source, progress: Callable[[str], None] = lambda _: None
) -> Lowered:
    """The plan on the model that it was made for. Raises `PlanError` where that is another one."""
    progress(f"recording {source.name}")
    samples = plan.batch_size // plan.micro_batches
    return apply_plan(plan, record_source(source, samples, plan))


def changed(
    plan: Plan,
    source: Source,
    changes: Changes,
    cluster: Cluster,
    progress: Callable[[str], None] = lambda _: None,
) -> PlanFile:
    """The same decisions with these changes, and what that costs on a cluster.

    A micro-batch has as many samples as before unless their number is given. What is sharded over
    all dp ranks still is. Raises `ConfigError` for numbers that do not divide, and what the model
    does not allow.
    """
    degrees = changed_degrees(plan, changes)
    local = degrees.micro_batches * degrees.samples
    asked = plan
    if changes.schedule is not None:
        asked = replace(plan, schedule=changes.schedule, order=())

    @cache
    def record(parts: int) -> Recording:
        progress(f"recording {source.name} with {local // parts} samples")
        return record_source(source, local // parts, plan)

    lowered = carry_plan(asked, degrees, record, plan.precision, cluster)
    progress("simulating the changed plan")
    return _predicted(lowered, cluster)


def changed_degrees(plan: Plan, changes: Changes) -> Degrees:
    """The grid of ranks and the batch after the changes. Raises `ConfigError` as `changed` does."""
    mesh = Mesh(changes.dp or plan.dp, changes.tp or plan.tp, changes.pp or plan.pp, plan.inner)
    batch = changes.batch or plan.batch_size * plan.dp
    for name, value in (("ranks", mesh.world_size), ("samples a step", batch)):
        if value > MOST:
            raise ConfigError(f"{value} {name} were asked for; give at most {MOST}")
    if batch % mesh.dp:
        raise ConfigError(
            f"a batch of {batch} samples does not divide over dp={mesh.dp}; give --batch a "
            "multiple of it"
        )
    local = batch // mesh.dp
    size = plan.batch_size // plan.micro_batches
    if changes.micro_batches is None and local % size:
        raise ConfigError(
            f"{local} samples of a dp rank do not divide into micro-batches of {size}, as the "
            "plan's are; give --micro-batches"
        )
    micro_batches = changes.micro_batches or local // size
    if local % micro_batches:
        raise ConfigError(
            f"{local} samples of a dp rank do not divide into {micro_batches} micro-batches; give "
            f"--micro-batches one of {[d for d in range(1, local + 1) if local % d == 0]}"
        )
    if plan.order and changes.schedule is None:
        now, before = (mesh.pp, micro_batches), (plan.pp, plan.micro_batches)
        if now != before:
            raise ConfigError(
                f"the plan's order of work is for {before[1]} micro-batches on {before[0]} "
                f"pipeline ranks, and there are to be {now[1]} on {now[0]}; give --schedule"
            )
    chunks = len(plan.rank_of) // plan.pp
    if changes.schedule is not None:
        chunks = len(stage_ranks(changes.schedule, 1))
    whole = {plan.dp: mesh.dp}
    counts = {n for s in plan.state_shards for n in (s.parameters, s.gradients, s.optimizer)}
    shards = {n: whole.get(n, math.gcd(n, mesh.dp)) for n in counts}
    return Degrees(mesh, micro_batches, local // micro_batches, chunks, shards)


def record_source(source: Source, samples: int, plan: Plan) -> Recording:
    """The source's forward on so many samples, as the plan's micro-batches are recorded."""
    args, kwargs = call_arguments(source.batch(samples))
    layout = BatchLayout((samples, samples), 1)  # in parts, whatever their number
    cpu = torch.device("cpu")
    return record_part(
        source.model, args, kwargs, layout, cpu, plan.precision, dims=plan.batch_dims
    )


def _predicted(lowered: Lowered, cluster: Cluster) -> PlanFile:
    prediction, _ = predict(lowered, cluster, dp_rank=0)
    return PlanFile(lowered.plan, prediction)
