"""`python -m benchmarks.state_equivalence`: sharded state trains, and weighs, as it should.

Every way to shard parameters, gradients and optimizer state over four dp ranks, with tp = 2 and
with pp = 2, also with shards that differ from stage to stage and with clipped gradients: five AdamW
steps in float64 against one process, and the bytes that are really alive on each rank against

    p P / s_p + g P / s_g + o P / s_os

with (p, g, o) = (8, 8, 16) bytes in float64 and (2, 2, 12) in mixed precision. On two ranks every
way is compared bit by bit with torch's `DistributedDataParallel`.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.reports import told_command
from benchmarks.state_cells import (
    BATCH_SIZE,
    BOUND,
    BYTES_BOUND,
    CASES,
    CLIP_NORM,
    KINDS,
    MICRO_BATCHES,
    STEPS,
    Cell,
    Equality,
    all_cells,
    all_equalities,
    measure_cell,
    measure_equality,
)

TABLE_WIDTH = 130
COLUMNS = (
    "model", "dp = 4 and", "shards", "", "error", "parameters", "gradients", "optimizer", "padding",
    "gathered", "in flight",
)  # fmt: skip


def complaint(cell: Cell) -> str:
    """What is out of its bound."""
    if cell.failed:
        return cell.failed
    found = []
    if cell.error is not None and not cell.error.error <= BOUND:
        found.append(f"{cell.error.name} differs by {cell.error.error:.2e}")
    over = [kind for kind in KINDS if cell.byte_error(kind) > BYTES_BOUND]
    found += [f"the bytes of {kind} by {cell.byte_error(kind):.2%}" for kind in over]
    return "; ".join(found)


def measure_all(
    cells: Sequence[Cell], equalities: Sequence[Equality], timeout_s: float, console: Console
) -> Iterator[Cell | Equality]:
    """Everything, under a progress bar."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=len(cells) + len(equalities))
        for cell in cells:
            text = " | ".join(map(str, dict.fromkeys(cell.shards)))
            progress.update(bar, description=f"{cell.model}, {cell.mesh}: {text}")
            measured = measure_cell(cell, timeout_s)
            if not measured.passed:
                console.print(
                    f"{cell.model}, {cell.mesh}, {text}: {complaint(measured)}", markup=False
                )
            yield measured
            progress.advance(bar)
        for equality in equalities:
            progress.update(bar, description=f"{equality.model}, DDP: {equality.shards}")
            yield measure_equality(equality, timeout_s)
            progress.advance(bar)


def cell_texts(cell: Cell) -> list[str]:
    """A row: the largest relative errors, and what is held besides in shares of all parameters."""
    option = "clipped" if cell.clip_norm else cell.precision or ""
    shards = " | ".join(map(str, dict.fromkeys(cell.shards)))
    texts = [cell.model, cell.mesh, shards, option]
    texts.append("failed" if cell.failed else f"{cell.error.error:.0e}" if cell.error else "-")
    if not cell.held:
        return texts + ["-"] * 6
    texts += [f"{cell.byte_error(kind):.2%}" for kind in KINDS]
    return [*texts, str(cell.padding), *(f"{cell.share(k):.2f}" for k in ("gathered", "in_flight"))]


def cells_table(cells: Sequence[Cell]) -> Table:
    """A row a cell."""
    table = Table(title=f"{STEPS} steps against one process; bytes against the formula",
                  box=box.SIMPLE_HEAD)  # fmt: skip
    for k, name in enumerate(COLUMNS):
        table.add_column(name, justify="left" if k < 4 else "right")
    for cell in cells:
        table.add_row(*cell_texts(cell), style=None if cell.passed else "red")
    return table


def equality_texts(equalities: Sequence[Equality]) -> list[list[str]]:
    """A row a model and number of micro-batches, under a header of shards."""
    points = list(dict.fromkeys(e.shards for e in equalities))
    rows = [["model", "micro-batches", *map(str, points)]]
    for model, parts in dict.fromkeys((e.model, e.micro_batches) for e in equalities):
        own = {e.shards: e for e in equalities if (e.model, e.micro_batches) == (model, parts)}
        texts = ("equal" if own[s].passed else own[s].unequal.strip() for s in points)
        rows.append([model, str(parts), *(text.splitlines()[-1] for text in texts)])
    return rows


def equal_table(equalities: Sequence[Equality]) -> Table:
    """Which are bit-equal to DDP."""
    header, *rows = equality_texts(equalities)
    table = Table(
        *header, title="Bits, on two ranks, against DistributedDataParallel", box=box.SIMPLE_HEAD
    )
    for row in rows:
        table.add_row(*row)
    return table


def document(
    cells: Sequence[Cell], equalities: Sequence[Equality], command: str, wall_s: float
) -> str:
    """The tables as a page of the documentation, with when and on what they were measured."""
    passed = [c.passed for c in cells] + [e.passed for e in equalities]
    failed = passed.count(False)
    return f"""# Sharded state trains, and weighs, as it should

`{command}`, {datetime.date.today()}, {os.cpu_count()} CPU cores, gloo,
torch {torch.__version__}, transformers {transformers.__version__}, {wall_s:.0f} s in all:
{len(cells) + len(equalities)} comparisons, {failed} failed.

*Error* is the largest relative error in float64 of the loss and every gradient of {STEPS} AdamW
steps with weight decay, and of every weight after them, against the plain model in one process
({BATCH_SIZE} samples in {MICRO_BATCHES} micro-batches; bound {BOUND:.0e}); *clipped*: to a norm of
{CLIP_NORM}. Shards are those of parameters, gradients and optimizer state, of both stages if one is
given.

The next three are the largest relative differences, over all ranks, of the bytes that are alive
from p·P / s_p, g·P / s_g and o·P / s_os (bound {BYTES_BOUND:.0%}), where P are the elements of the
rank's stage and tp part, and p, g, o are 8, 8, 16 bytes in float64, and 2, 2, 12 in bf16-mixed.
Every tensor of the process is found by the garbage collector and counts as what it is reached from:
parameters and optimizer state between two steps, gradients between two micro-batches, after their
collectives. *Padding* is in elements a rank. *Gathered* are whole parameters that a reader has or
will have, at most two buckets, and *in flight* what gradients held besides before their collectives
had been waited for, both in shares of the bytes of all P parameters. The uneven model has sizes
that are primes and parameters of one and three elements; it is not weighed.

{_markdown([list(COLUMNS), *map(cell_texts, cells)])}

## Bit by bit

Two ranks, float64, {STEPS} AdamW steps; every gradient of every step and every weight after them
against `DistributedDataParallel` with `torch.equal`. Each rank has as many labels as a power of
two, so that nothing may differ but the order in which micro-batches are added: DDP adds before it
reduces (`no_sync`) where gradients are not sharded, and else reduces each micro-batch and then
adds, as the shards do. Gradients are made and then added, as by autograd: a product that adds to
the sum of others while it is made, as it does elsewhere, rounds the last bit otherwise.

{_markdown(equality_texts(equalities))}
"""


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    header, *body = rows
    lines = [header, ["---"] * len(header), *body]
    return "\n".join("| " + " | ".join(t.replace("|", "·") for t in line) + " |" for line in lines)


def main(
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Also write the figures here.")
    ] = None,
    doc: Annotated[
        Path | None, typer.Option(help="Also write the tables here, as Markdown.")
    ] = None,
    models: Annotated[str, typer.Option(help="Comma-separated; all if empty.")] = "",
    quick: Annotated[bool, typer.Option(help="One cell of each kind.")] = False,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds per cell.")] = 180.0,
) -> None:
    """Compares every point with one process, DDP and the formula; exits with 1 where one fails."""
    start_s = time.perf_counter()
    torch.set_num_threads(1)
    console = Console()
    wanted = models.split(",") if models else list(CASES)
    planned = [c for c in all_cells(quick) if c.model in wanted]
    compared = [e for e in all_equalities(quick) if e.model in wanted]
    measured = list(measure_all(planned, compared, timeout_s, console))
    cells = [c for c in measured if isinstance(c, Cell)]
    equalities = [e for e in measured if isinstance(e, Equality)]
    console.width = max(console.width, TABLE_WIDTH)
    console.print(cells_table(cells))
    console.print(equal_table(equalities))
    wall_s = time.perf_counter() - start_s
    failed = sum(not found.passed for found in measured)
    verdict = "FAILED" if failed else "passed"
    console.print(f"{verdict}: {len(measured)} comparisons, {failed} failed, {wall_s:.0f} s")
    if doc is not None:
        command = told_command("benchmarks.state_equivalence", sys.argv[1:])
        doc.write_text(document(cells, equalities, command, wall_s))
    if json_path is not None:
        body = {"wall_s": wall_s, "cells": [dataclasses.asdict(found) for found in measured]}
        json_path.write_text(json.dumps(body, indent=1) + "\n")
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
