"""`merakc show --passes`: the passes of the compiler at work on a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from merakc.cli.clusters import machines, machines_of, product_dtype
from merakc.cli.console import answer
from merakc.costs.device import place_on
from merakc.ir.plan import Plan
from merakc.ir.plan_file import PlanFile
from merakc.lowering.overlap import with_parts
from merakc.machines.cluster import Cluster
from merakc.passes.running import Pass, watched
from merakc.planner.sources.source import Source, load_source
from merakc.planner.what_if import applied, record_source
from merakc.report.passes import PassEffect, effects_table, pass_effect


def effects_on(
    file: PlanFile,
    text: str,
    sequence: int | None,
    cluster: str | None,
    progress: Callable[[str], None],
    *,
    trust: bool,
) -> list[PassEffect]:
    """What every pass does to the model that a text names, on machines of that name, or the plan's.

    Raises `MerakError` where there are no such ones, and where the plan is of another model.
    """
    source = load_source(text, sequence, trust_remote_code=trust)
    plan = file.decisions
    on = machines(cluster or machines_of(file), product_dtype(plan, source))
    return pass_effects(plan, source, on, progress)


def pass_effects(
    plan: Plan, source: Source, cluster: Cluster, progress: Callable[[str], None]
) -> list[PassEffect]:
    """What every pass does where a plan is compiled for all stages and the first tp rank.

    Raises `PlanError` where the plan is of another model.
    """
    found: list[PassEffect] = []
    place = place_on(cluster, plan.tp, cp=plan.cp)

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


def print_effects(effects: Sequence[PassEffect], *, as_json: bool) -> None:
    """A table of what the passes did, or each run of each as JSON."""
    answer([asdict(effect) for effect in effects], effects_table(effects), as_json=as_json)
