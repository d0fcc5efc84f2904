"""The command line: plans made, shown and compared without ranks, weights or GPUs.

Exit codes: 0 where all is well, 1 where the answer is no (plans differ, nothing fits), 2 for
arguments that cannot be used.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from merakc.cli.bench import PASSED_ON, bench
from merakc.cli.calibrate import calibrate
from merakc.cli.checkpoint import app as checkpoint
from merakc.cli.clusters import HELP, machines, machines_of, product_dtype
from merakc.cli.console import NO, AsJson, TrustCode, check_outputs, progress_console, told, working
from merakc.cli.diff import diff
from merakc.cli.doctor import doctor
from merakc.cli.graph import graph
from merakc.cli.launch import OF_THE_SCRIPT, launch
from merakc.cli.passes import pass_effects
from merakc.cli.scale import scale
from merakc.cli.simulate import simulate
from merakc.cli.verify import verify
from merakc.errors import ConfigError
from merakc.ir.plan_file import PlanFile, load_plan
from merakc.ir.precision import parse_precision
from merakc.ir.report import Verdict
from merakc.machines.garbage import leave_garbage
from merakc.planner.offline import plan_offline
from merakc.planner.request import Request, with_schedule
from merakc.planner.sources import load_source
from merakc.report.analysis import make_report
from merakc.report.charts.plot import plot_timeline
from merakc.report.findings import verdict
from merakc.report.packing import unpack
from merakc.report.page import require_report, write_page
from merakc.report.passes import PassEffect, effects_table
from merakc.report.terminal import Terminal
from merakc.report.text import plan_table, report_table
from merakc.report.trace import write_trace
from merakc.report.units import format_bytes

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Plans for training in 3D parallelism."
)
PICTURES = (".png", ".svg", ".pdf")


@app.callback()
def _own_process() -> None:
    leave_garbage()


@app.command()
def plan(
    source: Annotated[
        str, typer.Argument(help="A preset, a config.json, its folder, or MODULE:FUNCTION.")
    ],
    batch: Annotated[int, typer.Option(help="Samples a step, over all ranks.", min=1)],
    output: Annotated[Path, typer.Option("-o", "--output", help="The plan file.")] = Path(
        "plan.json"
    ),
    sequence: Annotated[int | None, typer.Option("--seq", help="Tokens a text.", min=1)] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Devices, one rank each; all of the cluster's.", min=1)
    ] = None,
    cluster: Annotated[str, typer.Option(help=HELP)] = "h100",
    dp: Annotated[int | None, typer.Option(help="Data-parallel degree.", min=1)] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel degree.", min=1)] = None,
    pp: Annotated[int | None, typer.Option(help="Pipeline ranks.", min=1)] = None,
    micro_batches: Annotated[int | None, typer.Option(help="Of each dp rank.", min=1)] = None,
    schedule: Annotated[str, typer.Option(help="A name, an order of work, or its file.")] = "auto",
    recompute: Annotated[
        str, typer.Option(help="none, full, selective, stage, a budget (40GiB, 0.5) or auto.")
    ] = "auto",
    state_shards: Annotated[str | None, typer.Option(help="zero-0 to zero-3, or 1,1,8.")] = None,
    precision: Annotated[str | None, typer.Option(help="bf16-mixed or fp16-mixed.")] = None,
    overlap: Annotated[
        int | None, typer.Option(help="Parts of a micro-batch; 0: tp's collectives block.", min=0)
    ] = None,
    offload: Annotated[
        str, typer.Option(help="none, auto, optimizer, activations, or how much (4GiB) moves.")
    ] = "none",
    trust: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Choose a plan for a model and write it to a file."""
    progress = progress_console()
    with told(progress), working(progress, f"reading {source}") as tell:
        check_outputs(output=output)
        mixed = parse_precision(precision)
        found = machines(cluster, mixed.compute if mixed else "float32", ranks)
        ranks = ranks or len(found.described(1).devices)
        request = Request(
            ranks, 0, dp, tp=tp, pp=pp, micro_batches=micro_batches, schedule=schedule, order=(),
            recompute=recompute, sequence_parallel=None,
            state_shards=_shards(state_shards), precision=mixed, overlap=overlap,
            offload=offload,
        )  # fmt: skip
        given = load_source(source, sequence, trust_remote_code=trust)
        lowered, others = plan_offline(given, with_schedule(request), batch, found, tell)
        tell("writing the report")
        told_of = make_report(lowered, found, alternatives=others)
        told_of = replace(told_of, machines=cluster)
        made = PlanFile(lowered.plan, lowered.prediction, report=told_of)
        made.save(output)
    _print(made, as_json=as_json)
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


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="A plan file.")],
    html: Annotated[Path | None, typer.Option(help="Write a page that stands alone.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a timeline for Perfetto.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write the schedule as a picture.")] = None,
    passes: Annotated[
        str | None,
        typer.Option(metavar="SOURCE", help="The plan's model: tell what each pass does to it."),
    ] = None,
    sequence: Annotated[int | None, typer.Option("--seq", help="As for `plan`.", min=1)] = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="With --passes: the machines that seconds are of; the plan's."),
    ] = None,
    trust: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Show what a plan decides, and what it expects: as text, a page, a timeline or a picture.

    With --passes, what each pass of the compiler does to the plan's model instead.
    """
    said = progress_console()
    with told(said):
        if png is not None and png.suffix not in PICTURES:
            raise ConfigError(f"--png {png}: its name must end with one of {', '.join(PICTURES)}")
        check_outputs(html=html, trace=trace, png=png)
        found = load_plan(file)
        if passes is not None:
            given = load_source(passes, sequence, trust_remote_code=trust)
            decided = found.decisions
            on = machines(cluster or machines_of(found), product_dtype(decided, given))
            with working(said, "recording") as tell:
                effects = pass_effects(decided, given, on, tell)
        if trace is not None or png is not None:
            step = unpack(require_report(found, str(file)).timeline)
        if html is not None:
            write_page(found, html)
        if trace is not None:
            write_trace(step.events, trace, memory=step.memory, collectives=step.collectives)
        if png is not None:
            title = f"{found.decisions.model}: the simulated step"
            plot_timeline(png, step.events, title=title, collectives=step.collectives)
        written = [path for path in (html, trace, png) if path is not None]
        for path in written:
            said.print(f"written to {path}")
        if passes is not None:
            _print_effects(effects, as_json=as_json)
        elif as_json or not written:
            _print(found, as_json=as_json, whole=True)


def _print_effects(effects: Sequence[PassEffect], *, as_json: bool) -> None:
    """A table of what the passes did, or each run of each as JSON."""
    if as_json:
        Terminal().print_json(json.dumps([asdict(effect) for effect in effects]))
    else:
        Terminal().print(effects_table(effects))


def _shards(text: str | None) -> str | tuple[int, ...] | None:
    """`1,1,8` as numbers; a name as it is."""
    if text is None or "," not in text:
        return text
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(
            f"--state-shards {text}: give zero-1 to zero-3, or three numbers such as 1,1,8"
        ) from error


def _print(made: PlanFile, *, as_json: bool, whole: bool = False) -> None:
    """The decisions, after one line on what they cost; of the `whole`, the report as well."""
    console = Terminal()
    if as_json:
        console.print_json(json.dumps(asdict(made)))
        return
    if made.report is not None:
        console.print(Text(verdict(made.report.verdict), style="bold"))
    console.print(plan_table(made))
    if made.report is not None and whole:
        console.print(report_table(made.report, console.width))


app.command()(diff)
app.command()(calibrate)
app.command()(scale)
app.command()(simulate)
app.command()(verify)
app.command()(graph)
app.command()(doctor)
app.add_typer(checkpoint, name="checkpoint")
app.command(context_settings=OF_THE_SCRIPT)(launch)
app.command(context_settings=PASSED_ON)(bench)
