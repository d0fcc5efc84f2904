"""`merakc diff`: two plans, or a plan and the run of it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from merakc.cli.console import NO, AsJson, Skip, check_used, progress_console, told, warm_up
from merakc.files.printable import count_of
from merakc.ir.ledger import Ledger, read_ledger
from merakc.ir.plan_file import PlanFile, load_plan
from merakc.report.diff import changes_table, plan_changes, prediction_changes
from merakc.report.run import compare_run, figures, rows_table, timed_steps
from merakc.report.terminal import Terminal

LEDGER_SUFFIX = ".jsonl"


def diff(
    first: Annotated[Path, typer.Argument(help="A plan file.")],
    second: Annotated[Path, typer.Argument(help="Another, or the .jsonl ledger of a run.")],
    skip: Skip = None,
    every: Annotated[
        bool, typer.Option("--all", help="Name each parameter, and whole orders of work.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what two plans decide differently, or what a run took beside what its plan predicts.

    Exits with 1 where two plans differ.
    """
    is_run = second.suffix == LEDGER_SUFFIX
    with told(progress_console()):
        check_used(
            is_run, "of a run: give its .jsonl ledger in place of the second plan", skip=skip
        )
        check_used(not is_run, "of two plans: give another in place of the ledger", all=every)
    if is_run:
        with told(progress_console()):
            _show_run(
                load_plan(first), read_ledger(second), str(first), warm_up(skip), as_json=as_json
            )
        return
    with told(progress_console()):
        old, new = load_plan(first), load_plan(second)
    brief = not (every or as_json)
    changes = plan_changes(old.decisions, new.decisions, brief=brief)
    predictions = prediction_changes(old, new)
    console = Terminal()
    if as_json:
        found = {"changes": changes, "predictions": predictions}
        console.print_json(json.dumps({k: [asdict(c) for c in v] for k, v in found.items()}))
    elif changes:
        console.print(changes_table([*predictions, *changes], str(first), str(second)))
    else:
        console.print("the plans decide the same")
    if changes:
        raise typer.Exit(NO)


def _show_run(file: PlanFile, ledger: Ledger, where: str, skip: int, *, as_json: bool) -> None:
    rows = compare_run(file, ledger, where, skip)
    count = len(timed_steps(ledger, skip))
    if as_json:
        found = {"steps": count, "origin": ledger.header.origin, "rows": figures(rows)}
        Terminal().print_json(json.dumps(found))
        return
    title = (
        f"{file.decisions.model}: predicted, and the median of {count_of(count, 'measured step')}"
    )
    Terminal().print(rows_table(rows, title))
