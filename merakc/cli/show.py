"""`merakc show`: what a plan decides, and what it expects."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from merakc.cli.console import (
    AsJson,
    Price,
    SampleTokens,
    Tokens,
    TrustCode,
    check_outputs,
    check_picture,
    check_used,
    goal_of,
    progress_console,
    told,
    working,
)
from merakc.ir.plan_file import PlanFile, load_plan
from merakc.report.findings import verdict
from merakc.report.packing import Moments, unpack
from merakc.report.page import require_report, write_page
from merakc.report.terminal import Terminal
from merakc.report.text import plan_table, report_table
from merakc.report.trace import write_trace
from merakc.report.yields import Goal, yields_line

OF_PASSES = "of the model whose passes are shown: give --passes SOURCE too"


def show(
    file: Annotated[Path, typer.Argument(help="A plan file.")],
    html: Annotated[Path | None, typer.Option(help="Write a page that stands alone.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a timeline for Perfetto.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write the schedule as a picture.")] = None,
    passes: Annotated[
        str | None,
        typer.Option(metavar="SOURCE", help="The plan's model: tell what each pass does to it."),
    ] = None,
    sequence: SampleTokens = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="With --passes: machines to tell seconds of.", show_default="the plan's"),
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
        written = [path for path in (html, trace, png) if path is not None]
        goal = goal_of(tokens, price, is_told=not (written or as_json or passes))
        of_source = {"seq": sequence, "cluster": cluster, "trust_remote_code": trust}
        check_used(passes is not None, OF_PASSES, **of_source)
        found = load_plan(file)
        if passes is not None:
            # Here, since nothing else needs the compiler: a second of every `merakc show`.
            from merakc.cli.passes import effects_on, print_effects

            with working(said, "recording") as tell:
                effects = effects_on(found, passes, sequence, cluster, tell, trust=trust)
        if trace is not None or png is not None:
            step = unpack(require_report(found, str(file)).timeline)
        if html is not None:
            write_page(found, html)
        if trace is not None:
            write_trace(step.events, trace, memory=step.memory, collectives=step.collectives)
        if png is not None:
            _draw(png, step, f"{found.decisions.model}: the simulated step")
        for path in written:
            said.print(f"written to {path}")
        if passes is not None:
            print_effects(effects, as_json=as_json)
        elif as_json or not written:
            print_plan(found, goal, as_json=as_json, whole=True)


def _draw(path: Path, step: Moments, title: str) -> None:
    from merakc.report.charts.plot import plot_timeline  # with matplotlib

    plot_timeline(path, step.events, title=title, collectives=step.collectives, waits=step.waits)


def print_plan(made: PlanFile, goal: Goal, *, as_json: bool, whole: bool = False) -> None:
    """The decisions, after what they cost and yield; of the `whole`, the report as well."""
    console = Terminal()
    if as_json:
        console.print_json(made.text)
        return
    if made.report is not None:
        console.print(Text(verdict(made.report.verdict), style="bold"))
        console.print(Text(yields_line(made.report.verdict, goal)))
    console.print(plan_table(made))
    if made.report is not None and whole:
        console.print(report_table(made.report, console.width))
