"""Sharded state trains, and weighs, as it should.

Every way to shard parameters, gradients and optimizer state over four dp ranks, with tp = 2 and
with pp = 2, also with shards that differ from stage to stage and with clipped gradients: five AdamW
steps in float64 against one process, and the bytes that are really alive on each rank against

    p P / s_p + g P / s_g + o P / s_os

with (p, g, o) = (8, 8, 16) bytes in float64 and (2, 2, 12) in mixed precision. On two ranks every
way is compared bit by bit with torch's `DistributedDataParallel`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.equivalence.cells import BATCH_SIZE, BOUND, conclude
from benchmarks.equivalence.state_cells import (
    BYTES_BOUND,
    CASES,
    CLIP_NORM,
    KINDS,
    MICRO_BATCHES,
    STEPS,
    Equality,
    StateCell,
    all_cells,
    all_equalities,
    measure_cell,
    measure_equality,
)
from benchmarks.harness import DocPath, JsonPath, known, markdown, rich_table, tracked
from benchmarks.reports import told_run

TABLE_WIDTH = 130
COLUMNS = (
    "model", "dp = 4 and", "shards", "", "error", "parameters", "gradients", "optimizer", "padding",
    "gathered", "in flight",
)  # fmt: skip


def cell_texts(cell: StateCell) -> list[str]:
    """A row: the largest relative errors, and what is held besides in shares of all parameters."""
    option = "clipped" if cell.clip_norm else cell.precision or ""
    shards = " | ".join(map(str, dict.fromkeys(cell.shards)))
    texts = [cell.model, cell.mesh, shards, option]
    texts.append("failed" if cell.failed else f"{cell.error.error:.0e}" if cell.error else "-")
    if not cell.held:
        return texts + ["-"] * 6
    texts += [f"{cell.byte_error(kind):.2%}" for kind in KINDS]
    return [*texts, str(cell.padding), *(f"{cell.share(k):.2f}" for k in ("gathered", "in_flight"))]


def equality_texts(equalities: Sequence[Equality]) -> list[list[str]]:
    """A row a model and number of micro-batches, under a header of shards."""
    points = list(dict.fromkeys(e.shards for e in equalities))
    rows = [["model", "micro-batches", *map(str, points)]]
    for model, parts in dict.fromkeys((e.model, e.micro_batches) for e in equalities):
        own = {e.shards: e for e in equalities if (e.model, e.micro_batches) == (model, parts)}
        texts = ("equal" if own[s].passed else own[s].unequal or own[s].failed for s in points)
        rows.append([model, str(parts), *(text.strip().splitlines()[-1] for text in texts)])
    return rows


def document(
    cells: Sequence[StateCell], equalities: Sequence[Equality], about: str, wall_s: float
) -> str:
    """The tables as a page of the documentation, with when and on what they were measured."""
    passed = [c.passed for c in cells] + [e.passed for e in equalities]
    failed = passed.count(False)
    return f"""# Sharded state trains, and weighs, as it should

{about} {wall_s:.0f} s in all, over gloo:
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

{markdown([COLUMNS, *map(cell_texts, cells)])}

## Bit by bit

Two ranks, float64, {STEPS} AdamW steps; every gradient of every step and every weight after them
against `DistributedDataParallel` with `torch.equal`. Each rank has as many labels as a power of
two, so that nothing may differ but the order in which micro-batches are added: DDP adds before it
reduces (`no_sync`) where gradients are not sharded, and else reduces each micro-batch and then
adds, as the shards do. Gradients are made and then added, as by autograd: a product that adds to
the sum of others while it is made, as it does elsewhere, rounds the last bit otherwise.

{markdown(equality_texts(equalities))}
"""


def main(
    json_path: JsonPath = None,
    doc: DocPath = None,
    models: Annotated[str, typer.Option(help="Comma-separated; all if empty.")] = "",
    quick: Annotated[bool, typer.Option(help="One cell of each kind.")] = False,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds per cell.")] = 180.0,
) -> None:
    """Compares every point with one process, DDP and the formula; exits with 1 where one fails."""
    start_s = time.perf_counter()
    console = Console()
    wanted = known(models, CASES, "--models")
    planned = [c for c in all_cells(quick) if c.model in wanted]
    compared = [e for e in all_equalities(quick) if e.model in wanted]
    described = tracked(planned, lambda c: " ".join(cell_texts(c)[:4]), console)
    cells = [measure_cell(cell, timeout_s) for cell in described]
    described_equal = tracked(compared, lambda e: f"{e.model}, DDP: {e.shards}", console)
    equalities = [measure_equality(equality, timeout_s) for equality in described_equal]
    console.width = max(console.width, TABLE_WIDTH)
    texts = [
        [f"[red]{t}[/]" * bool(t) if not c.passed else t for t in cell_texts(c)] for c in cells
    ]
    title = f"{STEPS} steps against one process; bytes against the formula"
    console.print(rich_table([COLUMNS, *texts], left=4, title=title))
    title = "Bits, on two ranks, against DistributedDataParallel"
    console.print(rich_table(equality_texts(equalities), left=2, title=title))
    about = told_run("benchmarks.equivalence", sys.argv[1:])
    page = partial(document, cells, equalities, about, time.perf_counter() - start_s)
    conclude(console, [*cells, *equalities], json_path, doc=doc, page=page)
