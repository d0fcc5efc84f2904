"""The command line: plans made, shown and compared without ranks, weights or GPUs.

Exit codes: 0 where all is well, 1 where the answer is no (plans differ, nothing fits), 2 for
arguments that cannot be used.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from merakc.cli.bench import PASSED_ON, bench
from merakc.cli.budget import budget
from merakc.cli.calibrate import calibrate
from merakc.cli.checkpoint import app as checkpoint
from merakc.cli.clusters import machines, machines_of, product_dtype
from merakc.cli.console import (
    AsJson,
    Price,
    Tokens,
    TrustCode,
    check_outputs,
    check_picture,
    goal_of,
    progress_console,
    told,
    working,
)
from merakc.cli.diff import diff
from merakc.cli.doctor import doctor
from merakc.cli.graph import graph
from merakc.cli.launch import OF_THE_SCRIPT, launch
from merakc.cli.passes import pass_effects
from merakc.cli.plan import plan, print_plan
from merakc.cli.scale import scale
from merakc.cli.simulate import simulate
from merakc.cli.verify import verify
from merakc.ir.plan_file import load_plan
from merakc.machines.garbage import leave_garbage
from merakc.planner.sources.source import load_source
from merakc.report.charts.plot import plot_timeline
from merakc.report.packing import unpack
from merakc.report.page import require_report, write_page
from merakc.report.passes import PassEffect, effects_table
from merakc.report.terminal import Terminal
from merakc.report.trace import write_trace

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Plans for training in 3D parallelism."
)


@app.callback()
def _own_process() -> None:
    leave_garbage()


app.command()(plan)


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
    tokens: Tokens = None,
    price: Price = None,
    trust: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Show what a plan decides, and what it expects: as text, a page, a timeline or a picture.

    With --passes, what each pass of the compiler does to the plan's model instead.
    """
    said = progress_console()
    with told(said):
        check_picture("png", png)
        check_outputs(html=html, trace=trace, png=png)
        goal = goal_of(tokens, price)
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
            print_plan(found, goal, as_json=as_json, whole=True)


def _print_effects(effects: Sequence[PassEffect], *, as_json: bool) -> None:
    """A table of what the passes did, or each run of each as JSON."""
    if as_json:
        Terminal().print_json(json.dumps([asdict(effect) for effect in effects]))
    else:
        Terminal().print(effects_table(effects))


app.command()(diff)
app.command()(calibrate)
app.command()(scale)
app.command()(budget)
app.command()(simulate)
app.command()(verify)
app.command()(graph)
app.command()(doctor)
app.add_typer(checkpoint, name="checkpoint")
app.command(context_settings=OF_THE_SCRIPT)(launch)
app.command(context_settings=PASSED_ON)(bench)
