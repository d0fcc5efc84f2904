"""`merakc show --passes`: the passes of the compiler at work on a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from merakc.costs.device import place_on
from merakc.ir.plan import Plan
from merakc.lowering.overlap import with_parts
from merakc.machines.cluster import Cluster
from merakc.passes.running import Pass, watched
from merakc.planner.sources.source import Source
from merakc.planner.what_if import applied, record_source
from merakc.report.passes import PassEffect, pass_effect


def pass_effects(
    plan: Plan, source: Source, cluster: Cluster, progress: Callable[[str], None]
) -> list[PassEffect]:
    """What every pass does where a plan is compiled for all stages and the first tp rank.

    Raises `PlanError` where the plan is of another model.
    """
    found: list[PassEffect] = []
    place = place_on(cluster, plan.tp)

    def tell(each: Pass, given: Any, made: Any, seconds: float) -> None:
        found.append(pass_effect(each, given, made, place))

    with watched(tell):
        lowered = applied(plan, source, progress)
        lowered = with_parts(lowered, lambda n: record_source(source, plan.batch_size // n, plan))
        for stage in range(len(plan.rank_of)):
            progress(f"compiling stage {stage}")
            lowered.stage_graphs(stage, 0)
        lowered.head()
        lowered.with_collectives(lowered.programs())
    return found
