"""What a plan would cost with another batch, on other machines, or at other degrees."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import torch

from merakc.errors import ConfigError
from merakc.files.printable import count_of
from merakc.frontend.record import Recording
from merakc.ir.plan import Plan
from merakc.ir.plan_checks import MOST
from merakc.ir.plan_file import PlanFile
from merakc.ir.state import AUTO
from merakc.ir.strategy import NO_EXPERTS, Strategy
from merakc.lowering.lowered import Lowered, apply_plan
from merakc.lowering.overlap import overlap_gains, with_parts
from merakc.lowering.predict import predict
from merakc.lowering.recording import record_part
from merakc.machines.cluster import Cluster
from merakc.planner.carry import carry_plan, shards_like
from merakc.planner.request import Request
from merakc.planner.sources.source import Source
from merakc.report.analysis import make_report
from merakc.schedules.registry import stage_ranks

# What a request changes of a plan.
CHANGEABLE = ("dp", "cp", "tp", "pp", "schedule")


def simulated(
    plan: Plan, source: Source, cluster: Cluster, progress: Callable[[str], None] = lambda _: None
) -> PlanFile:
    """The plan with what it costs on a cluster. Raises `PlanError` where it is of another model."""
    lowered = applied(plan, source, progress)
    if plan.sub_batches:
        lowered = with_parts(lowered, partial(_in_parts, source, plan, plan.batch_size))
        lowered = replace(lowered, gains=overlap_gains(lowered))
    progress("simulating the plan")
    return _predicted(lowered, cluster)


def applied(
    plan: Plan, source: Source, progress: Callable[[str], None] = lambda _: None
) -> Lowered:
    """The plan on the model that it was made for. Raises `PlanError` where that is another one."""
    progress(f"recording {source.name}")
    return apply_plan(plan, record_source(source, plan.samples, plan))


def changed(
    plan: Plan,
    source: Source,
    changes: Request,
    cluster: Cluster,
    progress: Callable[[str], None] = lambda _: None,
) -> PlanFile:
    """The same decisions with these changes, and what that costs on a cluster.

    What the request leaves open stays. A micro-batch has as many samples as before unless their
    number is given. What is sharded over all dp ranks still is. Raises `ConfigError` for numbers
    that do not divide, and what the model does not allow.
    """
    strategy = changed_strategy(plan, changes)

    @cache
    def record(parts: int) -> Recording:
        progress(f"recording {source.name} with {count_of(strategy.batch_size // parts, 'sample')}")
        return _in_parts(source, plan, strategy.batch_size, parts)

    lowered = carry_plan(plan, strategy, record, cluster)
    progress("simulating the changed plan")
    return _predicted(lowered, cluster)


def changed_strategy(plan: Plan, changes: Request) -> Strategy:
    """The plan's strategy with what a request fixes. Raises `ConfigError` as `changed` does."""
    asked = {name: value for name, value in changes.fixed.items() if name in CHANGEABLE}
    strategy = replace(plan.strategy, **asked)
    batch = changes.total_batch_size or plan.total_batch_size
    for name, value in (("ranks", strategy.world_size), ("samples a step", batch)):
        if value > MOST:
            raise ConfigError(f"{value} {name} were asked for; give at most {MOST}")
    local = _divided(batch, strategy.dp)
    micro_batches = changes.micro_batches or _micro_batches(local, plan.samples)
    if local % micro_batches:
        raise ConfigError(
            f"a dp rank's {count_of(local, 'sample')} cannot be divided into "
            f"{count_of(micro_batches, 'micro-batch')}; give --micro-batches one of "
            f"{[d for d in range(1, local + 1) if local % d == 0]}"
        )
    strategy = replace(strategy, batch_size=local, micro_batches=micro_batches)
    if changes.schedule != AUTO:
        chunks = len(stage_ranks(changes.schedule, 1))
        strategy = replace(strategy, order=(), chunks=chunks)
    elif plan.order:
        _check_order(plan, strategy)
    if strategy.tp == 1 or strategy.cp > 1:
        strategy = replace(strategy, sequence_parallel=False)
    if strategy.cp == 1:
        strategy = replace(strategy, **NO_EXPERTS)
    counts = {n for shards in plan.state_shards for n in shards.counts}
    ranks = strategy.state_ranks
    divided = {n: math.gcd(n, ranks) for n in counts} | {plan.state_ranks: ranks}
    return shards_like(plan, strategy, divided)


def _divided(batch: int, dp: int) -> int:
    """The samples of each dp rank."""
    local, left = divmod(batch, dp)
    if left:
        raise ConfigError(
            f"a batch of {count_of(batch, 'sample')} does not divide over dp={dp}; give --batch a "
            "multiple of it"
        )
    return local


def _micro_batches(local: int, samples: int) -> int:
    """The number of micro-batches of as many samples as before."""
    micro_batches, left = divmod(local, samples)
    if left:
        raise ConfigError(
            f"a dp rank's {count_of(local, 'sample')} cannot be divided into micro-batches of "
            f"{samples}, as the plan's are; give --micro-batches"
        )
    return micro_batches


def _check_order(plan: Plan, strategy: Strategy) -> None:
    """Raises `ConfigError` where a plan's own order is for other ranks or micro-batches."""
    now, before = (strategy.pp, strategy.micro_batches), (plan.pp, plan.micro_batches)
    if now != before:
        raise ConfigError(
            f"the plan's order of work is for {count_of(before[1], 'micro-batch')} on {before[0]} "
            f"pipeline ranks, and there are to be {now[1]} on {now[0]}; give --schedule"
        )


def _in_parts(source: Source, plan: Plan, batch_size: int, parts: int) -> Recording:
    """The source's forward on one of so many parts of a dp rank's batch."""
    return record_source(source, batch_size // parts, plan)


def record_source(source: Source, samples: int, plan: Plan) -> Recording:
    """The source's forward on so many samples, as the plan's micro-batches are recorded."""
    args, kwargs, layout = source.part(samples, alone=plan.dp == 1)
    cpu = torch.device("cpu")
    return record_part(
        source.model, args, kwargs, layout, cpu, plan.precision, dims=plan.batch_dims
    )


def _predicted(lowered: Lowered, cluster: Cluster) -> PlanFile:
    prediction, simulation = predict(lowered, cluster, dp_rank=0)
    report = make_report(lowered, cluster, simulation=simulation)
    return PlanFile(lowered.plan, prediction, report=report)
