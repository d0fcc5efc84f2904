"""`merakc verify`: whether a plan trains as one process does."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from merakc.cli.console import NO, AsJson, SampleTokens, TrustCode, progress_console, told
from merakc.equality.check import STEPS, CheckResult, check_plan
from merakc.files.printable import count_of
from merakc.ir.plan import Plan
from merakc.ir.plan_file import load_plan
from merakc.planner.sources.source import load_source
from merakc.report.terminal import QUIET, Terminal

RANKS = 8  # 2 x 2 x 2: every axis, on any machine


def verify(
    file: Annotated[Path, typer.Argument(help="A plan file.")],
    source: Annotated[str, typer.Argument(help="The model it was made for: as in `merakc plan`.")],
    sequence: SampleTokens = None,
    ranks: Annotated[int, typer.Option(help="Local processes, at most.", min=1)] = RANKS,
    seed: Annotated[int, typer.Option(help="Seed of weights and batches.")] = 0,
    timeout_s: Annotated[
        float, typer.Option("--timeout", help="Seconds that the ranks may take.", min=1)
    ] = 300.0,
    trust: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Run a plan on local processes, on a small model of the same structure, and compare loss,
    every gradient and the updated weights with one process.

    Exits with 0 where they are equal, 1 where they differ, and 2 where nothing could be compared.
    """
    progress = progress_console()
    told_last = [""]

    def tell(text: str) -> None:
        # No live display: a fork while its thread holds a lock would hang the child.
        if text != told_last[0]:
            progress.print(text, style="dim")
        told_last[0] = text

    os.environ.setdefault(QUIET, "1")  # what ranks of the small model would say of themselves
    with told(progress):
        plan = load_plan(file).decisions
        given = load_source(source, sequence, trust_remote_code=trust)
        result = check_plan(plan, given, ranks=ranks, seed=seed, timeout_s=timeout_s, progress=tell)
    if as_json:
        plans = {"checked": result.checked, "replicas": result.replicas}
        shown = {name: _degrees(own) if own else None for name, own in plans.items()}
        body = {**asdict(result), **shown, "equal": result.equal}
        Terminal().print_json(json.dumps(body, default=str))
    else:
        Terminal().print(result_table(plan, result))
    if not result.equal:
        raise typer.Exit(NO)


def result_table(plan: Plan, result: CheckResult) -> Group:
    """What was run, what was compared and how near it was, and the verdict."""
    facts = Table.grid(padding=(0, 2))
    facts.add_row("plan", f"{plan.model}, {_text(plan)}")
    facts.add_row("checked", _text(result.checked))
    if result.replicas is not None:
        facts.add_row("", f"and, for want of ranks, {_text(result.replicas)}")
    small = count_of(result.parameters, "parameter")
    if result.lowered:
        lowered = (f"{name} {old} → {new}" for name, (old, new) in result.lowered.items())
        small += f" → {result.checked_parameters:,}: {', '.join(lowered)}"
    facts.add_row("model", small)
    if result.lost:
        facts.add_row("left out", f"{', '.join(result.lost)}, for want of ranks: give --ranks")
    if result.unlike:
        some = ", ".join(result.unlike[:3]) + ", ..." * (len(result.unlike) > 3)
        text = (
            f"along other dims than in the plan: {count_of(len(result.unlike), 'tensor')} ({some})"
        )
        facts.add_row("split", Text(text, "yellow"))
    if result.compared_with:
        facts.add_row("against", f"{result.compared_with}, {STEPS} AdamW steps")
    table = Table(box=box.SIMPLE_HEAD)
    for name, justify in (
        ("quantity", "left"), ("arithmetic", "left"), ("largest relative error", "right"),
        ("limit", "right"), ("where", "left"),
    ):  # fmt: skip
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in result.rows:
        style = "" if row.passed else "red"
        error = Text(f"{row.error:.1e}", style)
        table.add_row(row.quantity, row.arithmetic, error, f"{row.limit:.0e}", Text(row.name))
    if result.failed:
        last = Text(f"failed: {result.failed}", "red")
    elif result.equal:
        last = Text(f"equal to one process, in {result.seconds:.0f} s", "green")
    else:
        last = Text(f"DIFFERENT from one process, in {result.seconds:.0f} s", "red")
    return Group(facts, table, last)


def _degrees(plan: Plan) -> dict[str, object]:
    """The decisions of a plan in few words, by name."""
    found: dict[str, object] = {
        "dp": plan.dp, "cp": plan.cp, "tp": plan.tp, "pp": plan.pp, "stages": len(plan.rank_of),
        "micro_batches": plan.micro_batches, "schedule": plan.schedule,
        "recompute": plan.recompute, "sequence_parallel": plan.sequence_parallel,
        "expert_parallel": plan.expert_parallel,
        "state_shards": [str(s) for s in plan.state_shards],
        "precision": str(plan.precision) if plan.precision else None,
        "sub_batches": list(plan.sub_batches),
    }  # fmt: skip
    return found


def _text(plan: Plan) -> str:
    parts = [
        plan.shown_degrees,
        count_of(plan.micro_batches, "micro-batch"),
        f"{plan.schedule} on {count_of(len(plan.rank_of), 'stage')}",
        f"recompute {plan.recompute}",
    ]
    if plan.sequence_parallel:
        parts.append("sequence parallel")
    if plan.state_shards:
        parts.append(f"state shards {'; '.join(dict.fromkeys(map(str, plan.state_shards)))}")
    if plan.sub_batches:
        parts.append(f"sub-batches {', '.join(map(str, plan.sub_batches))}")
    if plan.precision:
        parts.append(str(plan.precision))
    return ", ".join(parts)
