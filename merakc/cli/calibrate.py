"""`merakc calibrate`: the cluster file of this machine, and factors from runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich import box
from rich.console import Group
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from merakc.cli.calibration import calibrate as measure
from merakc.cli.calibration import measurements, most_ranks
from merakc.cli.console import (
    AsJson,
    Skip,
    check_outputs,
    check_used,
    progress_console,
    told,
    warm_up,
)
from merakc.costs.fitted import Fit, fit_factors
from merakc.errors import CalibrationError
from merakc.files.printable import count_of
from merakc.files.writing import write_atomically
from merakc.ir.ledger import read_ledger
from merakc.machines.cluster import Device, Hardware
from merakc.machines.cluster_files import cluster_text
from merakc.machines.figures import Points
from merakc.report.run import timed_steps
from merakc.report.terminal import Terminal
from merakc.report.units import format_bytes, format_count, format_seconds

DEVICES = ("auto", "cpu", "cuda")


def calibrate(
    output: Annotated[Path, typer.Option("-o", "--output", help="The cluster file.")] = Path(
        "cluster.toml"
    ),
    ranks: Annotated[
        int | None,
        typer.Option(help="Local ranks.", show_default="one for each GPU, or one", min=1),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or auto.", show_default="auto")
    ] = None,
    runs: Annotated[
        list[Path] | None,
        typer.Option(
            "--from", help="A ledger to correct the cost model by; may be given several times."
        ),
    ] = None,
    skip: Skip = None,
    as_json: AsJson = False,
) -> None:
    """Measure this machine and write its cluster file; or correct one by the ledgers of runs."""
    progress = progress_console()
    with told(progress):
        check_outputs(output=output)
        check_used(bool(runs), "of runs: give their ledgers with --from", skip=skip)
        check_used(not runs, "of what is measured: give no --from", ranks=ranks, device=device)
        fits: list[Fit] = []
        if runs:
            found, fits = corrected(runs, warm_up(skip))
        else:
            found = measured(device or DEVICES[0], ranks, progress)
        write_atomically(output, cluster_text(found))
    if as_json:
        body = asdict(found) if not fits else {"factors": [asdict(fit) for fit in fits]}
        Terminal().print_json(json.dumps(body))
    elif fits:
        Terminal().print(fits_table(fits, len(runs or ())))
    else:
        Terminal().print(hardware_table(found))
    progress.print(f"written to {output}")


def measured(device: str, ranks: int | None, console: Terminal) -> Hardware:
    """This machine. Raises `CalibrationError` for a device that is not there."""
    if device not in DEVICES:
        raise CalibrationError(f"--device {device}: is not known; give one of {', '.join(DEVICES)}")
    gpus = torch.cuda.device_count()  # it opens no device: ranks can still be forked
    kind = device if device != "auto" else "cuda" if gpus else "cpu"
    place = torch.device(kind)
    if kind == "cuda" and not gpus:
        raise CalibrationError("--device cuda: there is no GPU that torch can use; see doctor")
    count = ranks or (most_ranks(place) if kind == "cuda" else 1)
    if kind == "cuda" and count > gpus:
        raise CalibrationError(f"--ranks {count}: there are {gpus} GPUs; give at most as many")
    with Progress(console=console, transient=True) as bars:
        # Ranks are forked while nothing is drawn: a fork while a thread holds a lock would hang.
        bars.stop()
        total = measurements(place) + (count > 1)
        task = bars.add_task("measuring", total=total)

        def tell(text: str) -> None:
            if text.startswith("links"):
                console.print(f"measuring {text}", style="dim")
            else:
                bars.start()
            bars.update(task, description=f"measuring {text}", advance=1)

        return measure(place, count, tell)


def corrected(runs: Sequence[Path], skip: int) -> tuple[Hardware, list[Fit]]:
    """The hardware of the ledgers with factors that they speak for."""
    ledgers = [read_ledger(path) for path in runs]
    steps = [timed_steps(ledger, skip) for ledger in ledgers]
    factors, fits = fit_factors(ledgers, steps)
    return replace(ledgers[0].header.hardware, factors=factors), fits


def hardware_table(found: Hardware) -> Group:
    """What was measured, in a few rows."""
    own, link = found.nodes[0], found.links[0]
    device = own.device
    facts = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    facts.add_row("device", f"{own.devices} x {device.name}, {format_bytes(device.memory_bytes)}")
    facts.add_row("launch", format_seconds(device.launch_s))
    facts.add_row("memory", f"{format_count(device.bytes_per_s)}B/s in large sums")
    if own.devices > 1:
        speed = f"{format_seconds(link.latency_s)} and {format_count(link.bytes_per_s)}B/s"
        facts.add_row("links", f"{link.name}: {speed}")
    if own.together:
        shares = ", ".join(f"{share:.0%}" for share in own.together)
        facts.add_row("together", f"{shares} of its speed with 1, 2, … of them at work")
    return Group(facts, _curves(device))


def _curves(device: Device) -> Table:
    """Rates of small, middle and large kernels."""
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("kernel", "dtype", "smallest", "middle", "largest", "fastest"):
        table.add_column(name, justify="left" if name in ("kernel", "dtype") else "right")
    assert device.profile is not None
    curves = (("product", device.profile.products), ("attention", device.profile.attention))
    rows: list[tuple[str, str, Points, str]] = [
        (name, dtype, points, "FLOP/s") for name, of in curves for dtype, points in of.items()
    ]
    rows.append(("sum", "float32", device.profile.traffic, "B/s"))
    for name, dtype, points, unit in rows:
        rates = [rate for _, rate in points]
        shown = [rates[0], rates[len(rates) // 2], rates[-1], max(rates)]
        table.add_row(name, dtype, *(f"{format_count(rate)}{unit}" for rate in shown))
    return table


def fits_table(fits: Sequence[Fit], runs: int) -> Table:
    """A row for each factor."""
    table = Table(
        title=f"Seconds of a step, added up over {count_of(runs, 'run')}", box=box.SIMPLE_HEAD
    )
    table.add_column("")
    for name in ("formulas", "measured", "factor before", "factor now"):
        table.add_column(name, justify="right")
    for fit in fits:
        known = fit.measured_s > 0
        cells = [format_seconds(fit.modelled_s), format_seconds(fit.measured_s)]
        table.add_row(
            fit.kind, *(cells if known else ["-", "not measured"]), f"{fit.before:.3f}",
            Text(f"{fit.after:.3f}", "bold" if known else "dim"),
        )  # fmt: skip
    return table
