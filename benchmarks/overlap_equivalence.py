"""`python -m benchmarks.overlap_equivalence`: communication under computation changes no result.

Models with dropout on run one step with the communication of their tensor parallelism overlapped,
whole or in parts of micro-batches, in float64, with and without pipeline stages and sequence
parallelism; or with every product that can be in one op with the collective beside it. Loss and
every gradient are compared with one process that overlaps nothing.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

import merakc
from benchmarks.layouts import Difference, worst_difference
from benchmarks.ranks import RankError, RankTimeoutError, run_ranks
from benchmarks.reference import Reference, lifted_casts, split_state, step_batch
from benchmarks.zoo_models import ZOO
from merakc.costs.work.flops import COLLECTIVES, PIPELINED
from merakc.machines.cluster import NOMINAL_CPU
from merakc.train.model import ParallelModel

TRIED = "gpt2,llama,qwen3,t5,bert,vit,mixtral,whisper,deepseek_v3,nn_transformer"
LAYOUTS = "2,1;4,1;2,2;4,2"  # tp, pp
PARTS = "1,2,4"
BATCH_SIZE, MICRO_BATCHES = 8, 2
FUSED = -1  # in the place of a number of parts: products in one op with their collectives
BOUND = 1e-10
DROPOUT = 0.1


@dataclass(frozen=True, slots=True)
class Cell:
    """One model on `tp` x `pp` ranks, with micro-batches in so many parts.

    `sub_batches` are those that the stages run, `started` the collectives of a micro-batch that
    rank 0 runs beside its computing, of `collectives`; `fused` those that are one op with products.
    """

    model: str
    tp: int
    pp: int
    parts: int
    sequence_parallel: bool = False
    sub_batches: tuple[int, ...] = ()
    started: int = 0
    collectives: int = 0
    fused: int = 0
    error: Difference | None = None
    failed: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether everything is within its bound, and every stage ran in the form asked for."""
        near = self.error is not None and self.error.error <= BOUND
        if self.parts == FUSED:
            return near and self.fused > 0
        return near and set(self.sub_batches) == {self.parts} and self.started > 0


@dataclass(frozen=True, slots=True)
class Step:
    """What one rank found."""

    result: Reference
    sub_batches: tuple[int, ...]
    started: int
    collectives: int
    fused: int


def train_step(model: str, tp: int, pp: int, parts: int, sequence_parallel: bool) -> Step:
    """One rank's part of a step; collective."""
    case = ZOO[model]
    batch = step_batch(case, BATCH_SIZE, torch.float64, 0)
    source, again = (case.model(torch.float64, dropout=DROPOUT) for _ in range(2))

    def made(source: nn.Module, **options: Any) -> ParallelModel:
        return merakc.auto_parallel(
            source, batch, dp=1, tp=tp, pp=pp, micro_batches=MICRO_BATCHES, schedule="1f1b",
            recompute="none", sequence_parallel=sequence_parallel, cluster=NOMINAL_CPU, **options,
        )  # fmt: skip

    with lifted_casts():
        parallel = made(source, overlap=1 if parts == FUSED else parts)
        if parts == FUSED:
            whole, source = parallel.plan, again
            fused = dataclasses.replace(whole, fused_products=tuple(sorted(whole.parameters)))
            parallel = made(source, plan=fused)
        loss = parallel(**batch)["loss"]
        loss.backward()
    gradients = parallel.full_gradients()
    _, buffers = split_state(source, parallel.full_state_dict())
    (step,) = parallel._own("_steps").compiled.values()
    graphs = [g for c in step.chunks.values() for g in (c.forward, c.backward) if g is not None]
    ops = [node.op for graph in graphs for node in graph.nodes]
    started = sum(op.startswith("start.") for op in ops)
    blocking = sum(op in COLLECTIVES for op in ops)
    joined = sum(op in PIPELINED for op in ops)
    found = Reference((loss.item(),), (gradients,), {}, buffers)
    return Step(found, parallel.plan.sub_batches, started, started + blocking + joined, joined)


@cache
def plain_step(model: str) -> Reference:
    """The same step in this process.

    Random numbers are merakc's, which torch's own dropout does not draw: `benchmarks.equivalence`
    compares this with eager training where nothing is drawn.
    """
    return train_step(model, 1, 1, 0, False).result


def measure(
    models: list[str],
    layouts: list[tuple[int, int]],
    parts: list[int],
    sequence_parallel: list[bool],
    timeout_s: float,
) -> Iterator[Cell]:
    """Every cell, model by model."""
    for model, (tp, pp), sequence, count in product(models, layouts, sequence_parallel, parts):
        start_s = time.perf_counter()
        cell = Cell(model, tp, pp, count, sequence)
        try:
            arguments = model, tp, pp, count, sequence
            found = run_ranks(tp * pp, train_step, *arguments, timeout_s=timeout_s)
            first = found[0]
            losses = [step.result.losses for step in found]
            cell = dataclasses.replace(
                cell,
                sub_batches=first.sub_batches,
                started=first.started,
                collectives=first.collectives,
                fused=first.fused,
                error=worst_difference(first.result, losses, plain_step(model), BOUND),
            )
        except (RankError, RankTimeoutError) as failure:
            cause = failure.__cause__ or failure
            cell = dataclasses.replace(cell, failed=f"{type(cause).__name__}: {cause}")
        yield dataclasses.replace(cell, seconds=time.perf_counter() - start_s)


def cells_table(cells: list[Cell]) -> Table:
    """A row a model, a column a layout and number of parts."""

    def column(cell: Cell) -> tuple[int, int, bool, int]:
        return cell.tp, cell.pp, cell.sequence_parallel, cell.parts

    columns = list(dict.fromkeys(map(column, cells)))
    table = Table(title="Largest relative error of loss and gradients in float64, dropout on")
    table.add_column("model")
    for tp, pp, sequence, parts in columns:
        form = "fused" if parts == FUSED else f"k = {parts}"
        table.add_column(f"tp {tp} pp {pp}{' sp' * sequence}\n{form}", justify="right")
    found = {(c.model, *column(c)): c for c in cells}
    for model in dict.fromkeys(c.model for c in cells):
        table.add_row(model, *(_text(found.get((model, *key))) for key in columns))
    return table


def _text(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    if cell.error is None:
        return "[red]failed[/]"
    as_asked = set(cell.sub_batches) == {1 if cell.parts == FUSED else cell.parts}
    whole = "" if as_asked else f" {cell.sub_batches}"
    return f"[{'green' if cell.passed else 'red'}]{cell.error.error:.0e}{whole}[/]"


def main(
    models: Annotated[str, typer.Option(help="Comma-separated.")] = TRIED,
    layouts: Annotated[str, typer.Option(help="tp,pp pairs.")] = LAYOUTS,
    parts: Annotated[str, typer.Option(help="Of a micro-batch; 1: whole; -1: fused.")] = PARTS,
    sequence_parallel: Annotated[bool, typer.Option(help="With sequence parallelism too.")] = False,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Also write the figures here.")
    ] = None,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds per cell.")] = 300.0,
) -> None:
    """Compares overlapped steps with one process; exits with 1 where a bound is exceeded."""
    torch.set_num_threads(1)
    console = Console(width=190)
    chosen = [(int(tp), int(pp)) for tp, pp in (text.split(",") for text in layouts.split(";"))]
    forms = [False, True] if sequence_parallel else [False]
    cells = []
    counts = [int(k) for k in parts.split(",")]
    for cell in measure(models.split(","), chosen, counts, forms, timeout_s):
        cells.append(cell)
        if not cell.passed:
            console.print(f"{cell}", markup=False)
    console.print(cells_table(cells))
    failed = sum(not cell.passed for cell in cells)
    console.print(f"{'FAILED' if failed else 'passed'}: {len(cells)} cells, {failed} failed")
    if json_path is not None:
        body = {"passed": not failed, "cells": [dataclasses.asdict(c) for c in cells]}
        json_path.write_text(json.dumps(body, indent=1) + "\n")
    raise typer.Exit(bool(failed))


if __name__ == "__main__":
    typer.run(main)
