"""`merakc doctor`: what this machine can do."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from merakc.cli.console import NO, AsJson, check_outputs, check_used, progress_console, told
from merakc.cli.health import Check, Status, all_checks
from merakc.errors import ConfigError
from merakc.files.printable import count_of
from merakc.files.writing import write_atomically
from merakc.report.terminal import Terminal

OF_GPUS = "of the training on GPUs: give --gpu too"
STYLES: dict[Status, str] = {"ok": "green", "warn": "yellow", "fail": "red"}


def doctor(
    as_json: AsJson = False,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Check the GPUs by training on them, for some minutes.")
    ] = False,
    output: Annotated[
        list[Path] | None,
        typer.Option(
            "-o",
            "--output",
            help="With --gpu: write the report, a .html or .json; may be given several times.",
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="With --gpu: cuda or cpu.", show_default="cuda")
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="With --gpu: only the checks with this in their name.")
    ] = None,
) -> None:
    """Check versions, devices, communication and settings of this machine, with remedies.

    Exits with 1 where anything fails; warnings are no failure.
    """
    progress = progress_console()
    with told(progress):
        check_used(gpu, OF_GPUS, output=output or None, device=device, only=only)
    if gpu:
        with told(progress):
            found = on_gpus(device or "cuda", only or "", output or [], progress)
    else:
        found = []
        for check in all_checks():
            found.append(check)
            progress.print(f"checked {check.name}", style="dim")
    if as_json:
        Terminal().print_json(json.dumps([asdict(check) for check in found]))
    else:
        Terminal().print(checks_table(found))
    if any(check.status == "fail" for check in found):
        raise typer.Exit(NO)


def on_gpus(device: str, only: str, outputs: list[Path], progress: Terminal) -> list[Check]:
    """What trains right on this machine's GPUs, and how fast. Raises `ConfigError` without any."""
    from merakc.gpu_check import checks, report  # they take seconds
    from merakc.gpu_check.run import run_all

    gpus = torch.cuda.device_count()
    if device not in ("cpu", "cuda") or (device == "cuda" and not gpus):
        raise ConfigError(
            f"--device {device}: this process sees {count_of(gpus, 'GPU')}; try the checks with "
            "--device cpu"
        )
    for output in outputs:
        check_outputs(output=output)
    asked = [c for c in checks.all_checks(device, gpus) if only in f"{c.room} {c.name}"]
    if not asked:
        raise ConfigError(f"--only {only}: no check has that in its name")
    found = []
    for one in run_all(asked):
        found.append(one)
        state = "passed" if one.ok else "FAILED"
        text = f"{len(found)} of {len(asked)}: {state} {one.room}, {one.name}: {one.text}"
        progress.print(text, style="dim" if one.ok else "red")
    found = report.in_order(found)
    for output in outputs:
        write = report.as_json if output.suffix == ".json" else report.page
        write_atomically(output, write(found, report.machine()))
        progress.print(f"written to {output}")
    return [Check(f"{f.room}: {f.name}", "ok" if f.ok else "fail", f.text) for f in found]


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
