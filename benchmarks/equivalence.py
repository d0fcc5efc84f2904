"""`python -m benchmarks.equivalence`: every layout trains exactly as one process does.

Ten models in nine layouts of up to eight ranks, in float64: the loss of each step, every gradient
of each step and every weight and buffer after the last are compared with a plain run in one
process, and the training is repeated and must be bit-equal. Models whose own code casts to float32
are compared twice: as they are, to 1e-5, and with those casts lifted on both sides, to 1e-10.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from benchmarks.layouts import Difference, Task, train_layout, train_twice, worst_difference
from benchmarks.models import EQUIVALENCE_MODELS, MODELS
from benchmarks.ranks import RankError, RankTimeoutError, run_ranks
from benchmarks.reference import Reference, train_reference
from merakc.errors import MerakError
from merakc.ir.program import Mesh

# (dp, tp, pp)
LAYOUTS = "1,1,1;2,1,1;1,2,1;1,1,2;1,1,4;2,2,1;1,2,2;2,1,2;2,2,2"
BATCH_SIZE = 8
MICRO_BATCHES = 4
STEPS = 3
BOUND = 1e-10
CAST_BOUND = 1e-5  # float32 has seven digits, and four layers of sums lose two
MAX_REFUSED_SHARE = 5 / 90
TABLE_WIDTH = 150  # nine layouts with two figures each


@dataclass(frozen=True, slots=True)
class Cell:
    """One model in one layout. `cast_error` is of the run with the model's float32 casts kept."""

    model: str
    layout: tuple[int, int, int]
    error: Difference | None = None
    cast_error: Difference | None = None
    bit_equal: bool | None = None
    refused: str = ""
    failed: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether nothing that was measured exceeds its bound."""
        return not (
            self.failed
            or self.bit_equal is False
            or (self.error is not None and not self.error.error <= BOUND)
            or (self.cast_error is not None and not self.cast_error.error <= CAST_BOUND)
        )


def measure_cell(
    model: str, layout: tuple[int, int, int], lift: bool | None, timeout_s: float
) -> Cell:
    """Trains one cell on forked ranks; `lift` picks one of the two comparisons, None both."""
    start_s = time.perf_counter()
    cell = Cell(model, layout)
    casts = MODELS[model].casts_float32
    try:
        if lift is not False or not casts:
            difference, unequal = _compare(model, layout, casts, True, timeout_s)
            failed = f"a second run differs: {unequal}" if unequal else ""
            cell = dataclasses.replace(cell, error=difference, bit_equal=not unequal, failed=failed)
        if casts and lift is not True:
            difference, _ = _compare(model, layout, False, False, timeout_s)
            cell = dataclasses.replace(cell, cast_error=difference)
    except RankError as error:
        if isinstance(error.__cause__, MerakError):
            cause = error.__cause__
            cell = dataclasses.replace(cell, refused=f"{type(cause).__name__}: {cause}")
        else:
            cell = dataclasses.replace(cell, failed=str(error))
    except RankTimeoutError as error:
        cell = dataclasses.replace(cell, failed=str(error))
    return dataclasses.replace(cell, seconds=time.perf_counter() - start_s)


def _compare(
    model: str, layout: tuple[int, int, int], lift: bool, repeat: bool, timeout_s: float
) -> tuple[Difference, str]:
    """The difference from the reference, and between two runs where `repeat` asks for two."""
    case, mesh = MODELS[model], Mesh(*layout)
    task = Task(case, mesh, BATCH_SIZE, MICRO_BATCHES, STEPS, lift)
    unequal = ""
    if repeat:
        pairs = run_ranks(mesh.world_size, train_twice, task, timeout_s=timeout_s)
        results = [result for result, _ in pairs]
        unequal = next((text for _, text in pairs if text), "")
    else:
        results = run_ranks(mesh.world_size, train_layout, task, timeout_s=timeout_s)
    reference = _reference(model, lift, mesh.dp if case.running_statistics else 1)
    losses = [result.losses for result in results]
    bound = CAST_BOUND if case.casts_float32 and not lift else BOUND
    return worst_difference(results[0], losses, reference, bound), unequal


@cache
def _reference(model: str, lift: bool, dp: int) -> Reference:
    return train_reference(
        MODELS[model],
        batch_size=BATCH_SIZE,
        micro_batches=MICRO_BATCHES,
        steps=STEPS,
        lift_casts=lift,
        dp=dp,
    )


def cells_table(cells: list[Cell], refusals: list[str]) -> Table:
    """Models by layouts: the largest error, and beside it the one with float32 casts kept."""
    layouts = list(dict.fromkeys(cell.layout for cell in cells))
    table = Table(title="Largest relative error in float64 (with the model's own float32 casts)")
    table.add_column("model")
    for layout in layouts:
        table.add_column("·".join(map(str, layout)), justify="right")
    found = {(cell.model, cell.layout): cell for cell in cells}
    for model in dict.fromkeys(cell.model for cell in cells):
        table.add_row(model, *[_cell_text(found[model, layout], refusals) for layout in layouts])
    table.caption = "columns: dp·tp·pp; every training repeated once and compared bit by bit"
    return table


def _cell_text(cell: Cell, refusals: list[str]) -> str:
    if cell.refused:
        return f"[yellow]refused {refusals.index(cell.refused) + 1}[/]"
    if cell.failed and cell.error is None and cell.cast_error is None:
        return "[red]failed[/]"
    texts = [f"{cell.error.error:.0e}"] if cell.error else []
    texts += [f"({cell.cast_error.error:.0e})"] if cell.cast_error else []
    texts += ["not bit-equal"] if cell.bit_equal is False else []
    return f"[{'green' if cell.passed else 'red'}]{' '.join(texts)}[/]"


def document(cells: list[Cell], refusals: list[str], wall_s: float) -> str:
    """The table as a page of the documentation, with when and on what it was measured."""
    layouts = list(dict.fromkeys(cell.layout for cell in cells))
    found = {(cell.model, cell.layout): cell for cell in cells}
    rows = [["model", *("·".join(map(str, layout)) for layout in layouts)]]
    rows.append(["---"] * len(rows[0]))
    for model in dict.fromkeys(cell.model for cell in cells):
        texts = [_cell_text(found[model, layout], refusals) for layout in layouts]
        rows.append([model, *(Text.from_markup(text).plain for text in texts)])
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    notes = (
        "\n".join(f"{k}. {reason}" for k, reason in enumerate(refusals, 1)) or "No cell refused."
    )
    return f"""# Every layout trains as one process does

`python -m benchmarks.equivalence`, {datetime.date.today()}, {os.cpu_count()} CPU cores, gloo,
torch {torch.__version__}, transformers {transformers.__version__}, {wall_s:.0f} s in all.

The largest relative error in float64 of the loss of each step, every gradient of each step, and
every weight and buffer after {STEPS} AdamW steps, against the plain model in one process on the
whole batch ({BATCH_SIZE} samples, trained in {MICRO_BATCHES} micro-batches; batch norms normalise
over each of these in both, by convention). Columns are dp·tp·pp. In brackets: with the casts to
float32 that the model's own code makes; without brackets those casts are lifted to float64 on both
sides. Every training ran twice and was compared bit by bit.

{table}

{notes}
"""


def measure_all(
    models: list[str],
    layouts: list[tuple[int, int, int]],
    lift: bool | None,
    timeout_s: float,
    console: Console,
) -> Iterator[Cell]:
    """Every cell, under a progress bar."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=len(models) * len(layouts))
        for model in models:
            for layout in layouts:
                progress.update(bar, description=f"{model} {layout}")
                yield measure_cell(model, layout, lift, timeout_s)
                progress.advance(bar)


def main(
    models: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(EQUIVALENCE_MODELS),
    layouts: Annotated[str, typer.Option(help="dp,tp,pp;dp,tp,pp;...")] = LAYOUTS,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Also write the figures here.")
    ] = None,
    lift: Annotated[
        bool | None,
        typer.Option("--lift/--no-lift", help="Only with float32 casts lifted, or only without."),
    ] = None,
    doc: Annotated[
        Path | None, typer.Option(help="Also write the table here, as Markdown.")
    ] = None,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds per training.")] = 120.0,
) -> None:
    """Compares layouts with one process; exits with 1 where a bound is exceeded."""
    start_s = time.perf_counter()
    torch.set_num_threads(1)
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    chosen = [_parse_layout(text) for text in layouts.split(";")]
    cells = list(measure_all(models.split(","), chosen, lift, timeout_s, console))
    refusals = list(dict.fromkeys(cell.refused for cell in cells if cell.refused))
    console.print(cells_table(cells, refusals))
    for k, reason in enumerate(refusals, 1):
        console.print(f"refused {k}: {reason}", markup=False)
    for cell in cells:
        if not cell.passed:
            console.print(f"{cell.model} {cell.layout}: {_complaint(cell)}", markup=False)
    refused = sum(bool(cell.refused) for cell in cells)
    good = all(cell.passed for cell in cells) and refused <= MAX_REFUSED_SHARE * len(cells)
    wall_s = time.perf_counter() - start_s
    console.print(
        f"{'passed' if good else 'FAILED'}: {len(cells)} cells, "
        f"{sum(not cell.passed for cell in cells)} failed, {refused} refused, {wall_s:.0f} s"
    )
    if doc is not None:
        doc.write_text(document(cells, refusals, wall_s))
    if json_path is not None:
        body = {"passed": good, "wall_s": wall_s, "cells": [dataclasses.asdict(c) for c in cells]}
        json_path.write_text(json.dumps(body, indent=1) + "\n")
    raise typer.Exit(0 if good else 1)


def _parse_layout(text: str) -> tuple[int, int, int]:
    dp, tp, pp = map(int, text.split(","))
    return dp, tp, pp


def _complaint(cell: Cell) -> str:
    if cell.failed:
        return cell.failed
    found = [d for d in (cell.error, cell.cast_error) if d is not None]
    return "; ".join(f"{d.name} differs by {d.error:.2e}" for d in found)


if __name__ == "__main__":
    typer.run(main)
