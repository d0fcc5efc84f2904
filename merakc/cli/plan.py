"""`merakc plan`: a plan chosen for a model, and written to a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from merakc.cli.clusters import HELP, machines
from merakc.cli.console import (
    NO,
    AsJson,
    DataParallel,
    Limit,
    LoadOfExperts,
    MicroBatches,
    Offload,
    PipelineRanks,
    Price,
    SampleTokens,
    SharingExperts,
    SharingSequences,
    StateShards,
    TensorParallel,
    Tokens,
    TrustCode,
    check_outputs,
    ending_after,
    goal_of,
    load_of,
    progress_console,
    shards_of,
    told,
    working,
)
from merakc.cli.show import print_plan
from merakc.ir.plan_file import PlanFile
from merakc.ir.precision import parse_precision
from merakc.ir.report import Verdict
from merakc.planner.choose import Patience
from merakc.planner.offline import plan_offline
from merakc.planner.request import Request, with_schedule
from merakc.planner.sources.source import load_source
from merakc.report.analysis import make_report
from merakc.report.units import format_bytes

Recompute = Annotated[
    str, typer.Option(help="none, full, selective, stage, a budget (40GiB, 0.5) or auto.")
]
Model = Annotated[
    str, typer.Argument(help="A preset, a config.json, its folder, or MODULE:FUNCTION.")
]
Ranks = Annotated[
    int | None, typer.Option(help="Devices, one rank each.", show_default="the cluster's", min=1)
]
Overlap = Annotated[
    int | None,
    typer.Option(
        help="Parts of a micro-batch that tp's collectives run under; 0: they block.", min=0
    ),
]
Mixed = Annotated[
    str | None, typer.Option(help="bf16-, fp8- or fp16-mixed.", show_default="the model's dtypes")
]
Output = Annotated[Path, typer.Option("-o", "--output", help="The plan file.")]


def plan(
    source: Model,
    batch: Annotated[int, typer.Option(help="Samples a step, over all ranks.", min=1)],
    output: Output = Path("plan.json"),
    sequence: SampleTokens = None,
    ranks: Ranks = None,
    cluster: Annotated[str, typer.Option(help=HELP)] = "h100",
    dp: DataParallel = None,
    tp: TensorParallel = None,
    cp: SharingSequences = None,
    ep: SharingExperts = None,
    expert_load: LoadOfExperts = None,
    pp: PipelineRanks = None,
    micro_batches: MicroBatches = None,
    schedule: Annotated[str, typer.Option(help="A name, an order of work, or its file.")] = "auto",
    recompute: Recompute = "auto",
    state_shards: StateShards = None,
    precision: Mixed = None,
    overlap: Overlap = None,
    offload: Offload = "none",
    tokens: Tokens = None,
    price: Price = None,
    limit: Limit = None,
    trust: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Choose a plan for a model and write it to a file.

    Ctrl-C, and the end of --limit, take the best that was found so far; a second Ctrl-C ends all.
    """
    patience = Patience(bears=True)
    progress = progress_console()
    with told(progress), working(progress, f"reading {source}") as tell:
        check_outputs(output=output)
        goal, mixed = goal_of(tokens, price, is_told=not as_json), parse_precision(precision)
        found = machines(cluster, mixed.compute if mixed else "float32", ranks)
        ranks = ranks or len(found.described(1).devices)
        request = Request(
            ranks, 0, dp, tp=tp, pp=pp, micro_batches=micro_batches, schedule=schedule, order=(),
            recompute=recompute, sequence_parallel=None, state_shards=shards_of(state_shards),
            precision=mixed, overlap=overlap, offload=offload,
        ).with_parts(cp, ep, load_of(expert_load))  # fmt: skip
        given = load_source(source, sequence, trust_remote_code=trust)
        asked = with_schedule(request)
        with ending_after(limit):
            lowered, others = plan_offline(given, asked, batch, found, tell, patience)
        tell("writing the report")
        told_of = make_report(lowered, found, alternatives=others, places=True)
        made = PlanFile(lowered.plan, lowered.prediction, report=replace(told_of, machines=cluster))
        made.save(output)
    print_plan(made, goal, as_json=as_json)
    progress.print("the search was stopped: others may be faster\n" * patience.stopped, end="")
    progress.print(f"written to {output}")
    _check_fits(told_of.verdict, progress)


def _check_fits(found: Verdict, problem: Console) -> None:
    """Exits with `NO` where a rank needs more than there is."""
    if not found.fits:
        problem.print(
            f"does not fit: a rank needs {format_bytes(found.peak_bytes)} of "
            f"{format_bytes(found.memory_bytes)}; use more ranks, or shard the state",
            style="red",
        )
        raise typer.Exit(NO)
