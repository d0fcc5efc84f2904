"""`merakc simulate`: what a plan would cost otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from merakc.cli.clusters import HELP, machines, machines_of, product_dtype
from merakc.cli.console import (
    NO,
    AsJson,
    DataParallel,
    MicroBatches,
    PipelineRanks,
    Price,
    SampleTokens,
    SharingSequences,
    TensorParallel,
    Tokens,
    TrustCode,
    answer,
    check_outputs,
    goal_of,
    progress_console,
    told,
    working,
)
from merakc.costs.ranks import least_spare, rank_memory_bytes
from merakc.ir.plan_file import PlanFile, load_plan
from merakc.machines.cluster import Cluster
from merakc.planner.request import Request
from merakc.planner.sources.source import load_source
from merakc.planner.what_if import changed, changed_strategy, simulated
from merakc.report.units import format_bytes, format_seconds
from merakc.report.yields import Goal, format_yield, yields

SHARES = ("bubble", "mfu")


def simulate(
    file: Annotated[Path, typer.Argument(help="A plan file.")],
    source: Annotated[str, typer.Argument(help="The model it was made for: as in `merakc plan`.")],
    sequence: SampleTokens = None,
    made_for: Annotated[
        str | None,
        typer.Option("--from", help=f"The machines before. {HELP}", show_default="the plan's"),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Other machines than those before.", show_default=False)
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Samples a step.", min=1)] = None,
    dp: DataParallel = None,
    tp: TensorParallel = None,
    cp: SharingSequences = None,
    pp: PipelineRanks = None,
    micro_batches: MicroBatches = None,
    schedule: Annotated[str | None, typer.Option(help="A schedule's name.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="The new plan.")] = None,
    tokens: Tokens = None,
    price: Price = None,
    trust: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Simulate a plan with another batch, other machines or degrees, all else as it decides.

    Exits with 1 where that does not fit the machines' memory.
    """
    progress = progress_console()
    with told(progress), working(progress, f"reading {file}") as tell:
        check_outputs(output=output)
        goal, made = goal_of(tokens, price), load_plan(file)
        plan = made.decisions
        given = load_source(source, sequence, trust_remote_code=trust)
        changes = Request(
            0, 0, dp, tp=tp, cp=cp, pp=pp, micro_batches=micro_batches,
            schedule=schedule or "auto", total_batch_size=batch,
        )  # fmt: skip
        first = made_for or machines_of(made)
        dtype, now = product_dtype(plan, given), changed_strategy(plan, changes).world_size
        old = machines(first, dtype, plan.mesh.world_size)
        new = machines(cluster or first, dtype, now)
        before = simulated(plan, given, old, tell)
        after = changed(plan, given, changes, new, tell)
        if output is not None:
            after.save(output)
    sides = _figures(before, old, goal), _figures(after, new, goal)
    figures = dict(zip(("before", "after"), sides, strict=True))
    answer(figures, sides_table(*sides), as_json=as_json)
    need, have = _tightest(after, new)
    if need > have:
        raise typer.Exit(NO)


def sides_table(first: Mapping[str, object], second: Mapping[str, object]) -> Table:
    """What both decide and cost, a column each, and by how much the figures changed."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for name in ("before", "after", "change"):
        table.add_column(name, justify="right", overflow="fold")
    for name, value in first.items():
        if name == "fits" or name not in second:
            continue
        old, new = _shown(name, value), _shown(name, second[name])
        change = ""
        if name not in SHARES and (isinstance(value, float) or name.endswith("_bytes")):
            base, now = float(str(value)), float(str(second[name]))
            change = f"{now / base - 1:+.1%}" if base and old != new else ""
        label = name.replace("_per_s", " a second").removesuffix("_s").removesuffix("_bytes")
        style = "bold" if old != new else ""
        table.add_row(label.replace("_", " "), old, new, change, style=style)
    for which, side in (("before", first), ("after", second)):
        if not side["fits"]:
            table.caption = (
                f"{which}: does not fit the {_shown('memory_bytes', side['memory_bytes'])}"
            )
    return table


def _figures(file: PlanFile, cluster: Cluster, goal: Goal) -> dict[str, object]:
    """The decisions and costs of one side, by name."""
    plan, found, report = file.decisions, file.prediction, file.report
    assert found is not None
    assert report is not None
    need, have = _tightest(file, cluster)
    batch = plan.batch_size * plan.dp
    return {
        "machines": cluster.name,
        "ranks": plan.mesh.world_size,
        "degrees": plan.shown_degrees,
        "batch": batch,
        "micro_batches": plan.micro_batches,
        "schedule": plan.schedule,
        "recompute": plan.recompute,
        "state_shards": "; ".join(dict.fromkeys(map(str, plan.state_shards))) or "none",
        "step_s": found.step_s,
        "samples_per_s": batch / found.step_s,
        **yields(report.verdict, goal),
        "mfu": report.verdict.mfu,
        "bubble": found.bubble_share,
        "waits_for_dp_s": max(found.exposed_s, default=0.0),
        "peak_memory_bytes": need,
        "memory_bytes": have,
        "fits": need <= have,
    }


def _shown(name: str, value: object) -> str:
    if name in SHARES:
        return f"{value:.1%}"
    if isinstance(value, float) and name.endswith("_s") and name != "samples_per_s":
        return format_seconds(value)
    if isinstance(value, float):
        return format_yield(value)
    if name.endswith("_bytes") and isinstance(value, int):
        return format_bytes(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def _tightest(file: PlanFile, cluster: Cluster) -> tuple[int, int]:
    """The bytes that the rank with least to spare needs at its peak, and those that it has."""
    assert file.prediction is not None
    peaks, memory = file.prediction.peak_bytes, rank_memory_bytes(cluster, file.decisions.mesh)
    rank = least_spare(peaks, memory)
    return peaks[rank], memory[rank]
