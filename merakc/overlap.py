"""Decides where tensor-parallel communication runs under computation, and in how many parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from merakc.cluster import Cluster
from merakc.errors import ConfigError, MerakError
from merakc.frontend.record import Recording
from merakc.passes.gather_products import gathers
from merakc.passes.stages import split_stages, stages_like
from merakc.passes.sub_batches import Parts, make_parts
from merakc.passes.subpipeline import stage_seconds
from merakc.planner import Lowered, planned_sharding, training_graph, weighed

# Parts of a micro-batch that are tried. More hide more, and multiply smaller matrices.
COUNTS = (2, 4)
# The share of a stage's seconds that it must save: estimates are not better than that.
WORTH = 0.03


def with_parts(
    lowered: Lowered, record: Callable[[int], Recording], samples: int | None = None
) -> Lowered:
    """The same with the parts of micro-batches that its plan asks for.

    `record` gives the recording for a number of micro-batches. Where `samples`, those of a dp
    rank, do not divide into the parts, a micro-batch runs whole. Raises `PlanError` where the
    graph of a part does not take the plan's splits.
    """
    plan = lowered.plan
    counts = sorted({count for count in plan.sub_batches if count > 1})
    if samples is not None:
        counts = [k for k in counts if samples % (plan.micro_batches * k) == 0]
    return replace(lowered, parts=tuple(_parts(lowered, record, count) for count in counts))


def _parts(lowered: Lowered, record: Callable[[int], Recording], count: int) -> Parts:
    plan, whole = lowered.plan, lowered.loss.graph
    recording = record(plan.micro_batches * count)
    graph = weighed(training_graph(recording.graph), plan.tp, gathered=gathers(whole)).graph
    sharding = planned_sharding(graph, plan)
    of = stages_like(graph, whole, lowered.stages.of)
    stages = split_stages(graph, of, len(plan.rank_of), sharding)
    return make_parts(whole, lowered.stages, graph, stages)


def choose_overlap(
    lowered: Lowered, record: Callable[[int], Recording], cluster: Cluster, asked: int | None
) -> Lowered:
    """The same with the parts in which each stage runs a micro-batch, and what that saves.

    `record` gives the recording for a number of micro-batches. `asked` is the number of parts, 0
    for collectives that block; where it is None, each stage gets what takes least time by the
    figures of `cluster`. A stage that cannot run in parts runs whole.

    Raises `ConfigError` where parts are asked for and no stage can run in them.
    """
    plan = lowered.plan
    if asked == 0 or plan.tp == 1:
        return lowered
    tried, failure = _tried(lowered, record, asked)
    counts, gains = [], []
    for stage in range(len(plan.rank_of)):
        blocking_s = stage_seconds(lowered.stages.local[stage], cluster)[1]
        found: dict[int, float] = {}
        for count, made in tried.items():
            try:
                found[count] = stage_seconds(made.local(stage, 0), cluster)[0]
            except MerakError as error:
                failure = error
        best = asked if asked in found else min(found, key=lambda count: (found[count], count))
        assert best is not None
        counts.append(best)
        gains.append(1 - found[best] / blocking_s)
    if asked is None and max(gains) < WORTH:
        return lowered
    if asked is not None and asked not in counts:
        raise ConfigError(f"overlap={asked}: no stage can run a micro-batch so: {failure}")
    chosen = replace(
        plan,
        sub_batches=tuple(counts),
        overlap_gains=tuple(gains),
        machines=replace(cluster, memory_bytes=0, hardware=None),
    )
    return with_parts(replace(lowered, plan=chosen), record)


def _tried(
    lowered: Lowered, record: Callable[[int], Recording], asked: int | None
) -> tuple[dict[int, Lowered], MerakError | None]:
    """The plan with the same number of parts on all stages, by that number, and why one failed."""
    plan, found = lowered.plan, {1: lowered}
    failure: MerakError | None = None
    for count in COUNTS if asked is None else (asked,):
        if plan.batch_size % (plan.micro_batches * count):
            failure = ConfigError(
                f"{plan.batch_size} samples do not divide into {plan.micro_batches} micro-batches "
                f"of {count} parts"
            )
            continue
        parted = replace(plan, sub_batches=(count,) * len(plan.rank_of))
        try:
            found[count] = with_parts(replace(lowered, plan=parted), record)
        except MerakError as error:
            failure = error
    return found, failure
