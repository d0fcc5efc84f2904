"""`merakc doctor`: what this machine can do."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

import typer
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from merakc.cli.console import NO, AsJson, progress_console
from merakc.cli.health import Check, Status, all_checks
from merakc.report.terminal import Terminal

STYLES: dict[Status, str] = {"ok": "green", "warn": "yellow", "fail": "red"}


def doctor(as_json: AsJson = False) -> None:
    """Check versions, devices, communication and settings of this machine, with remedies.

    Exits with 1 where anything fails; warnings are no failure.
    """
    progress = progress_console()
    found: list[Check] = []
    for check in all_checks():
        found.append(check)
        progress.print(f"checked {check.name}", style="dim")
    if as_json:
        Terminal().print_json(json.dumps([asdict(check) for check in found]))
    else:
        Terminal().print(checks_table(found))
    if any(check.status == "fail" for check in found):
        raise typer.Exit(NO)


def checks_table(found: Sequence[Check]) -> Group:
    """A line for each check, its remedy below it, and how many there are of each kind."""
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("", "check", "found"):
        table.add_column(name, overflow="fold")
    for check in found:
        text = Text(check.found)
        if check.remedy:
            text.append(f"\n→ {check.remedy}", "bold")
        table.add_row(Text(check.status, STYLES[check.status]), Text(check.name), text)
    counts = Counter(check.status for check in found)
    return Group(table, Text(", ".join(f"{counts[s]} {s}" for s in STYLES)))
