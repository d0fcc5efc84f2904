"""`python -m benchmarks.schedule_equivalence`: every order of work trains as one process does.

Models with dropout on run one step under every schedule and every setting of recomputation, in
float64, on several pipeline ranks. The loss and every gradient are compared with one process, and
bit by bit between schedules that add up in the same order: those with the same stages on the same
ranks, whatever is recomputed.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

import merakc
from benchmarks.layouts import Difference, first_inequality, worst_difference
from benchmarks.models import MODELS
from benchmarks.ranks import RankError, RankTimeoutError, run_ranks
from benchmarks.reference import Reference, lifted_casts, split_state, step_batch
from merakc.errors import CutError
from merakc.machines.cluster import NOMINAL_CPU
from merakc.schedules.registry import NAMES

TRIED = "gpt2,llama,t5,bert,resnet"
RECOMPUTATIONS = "none,full,selective"
BATCH_SIZE, MICRO_BATCHES = 8, 8
BOUND = 1e-10
DROPOUT = 0.1
ALWAYS_RECOMPUTES = ("merak",)


@dataclass(frozen=True, slots=True)
class Cell:
    """One model under one schedule and recomputation on `pp` ranks.

    `unequal` names the first tensor that is not bit-equal to that of the cells before which add up
    in the same order.
    """

    model: str
    pp: int
    schedule: str
    recompute: str
    error: Difference | None = None
    unequal: str = ""
    refused: str = ""
    failed: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether it ran and everything is within its bound."""
        near = self.error is not None and self.error.error <= BOUND
        return bool(self.refused) or (near and not self.unequal and not self.failed)


def train_step(
    model: str, pp: int, schedule: str, recompute: str
) -> tuple[Reference, tuple[int, ...]]:
    """One rank's part of a step; collective. Also the ranks of the stages."""
    case = MODELS[model]
    source = case.model(torch.float64, dropout=DROPOUT)
    batch = step_batch(case, BATCH_SIZE, torch.float64, 0)
    with lifted_casts():
        parallel = merakc.auto_parallel(
            source, batch, pp=pp, micro_batches=MICRO_BATCHES, schedule=schedule,
            recompute=recompute, cluster=NOMINAL_CPU,
        )  # fmt: skip
        loss = parallel(**batch)["loss"]
        loss.backward()
    gradients = parallel.full_gradients()
    _, buffers = split_state(source, parallel.full_state_dict())
    return Reference((loss.item(),), (gradients,), {}, buffers), parallel.plan.rank_of


def plain_step(model: str) -> Reference:
    """The same step in this process, on one stage.

    Random numbers are merakc's, which torch's own dropout does not draw: `benchmarks.equivalence`
    compares this with eager training where nothing is drawn.
    """
    return train_step(model, 1, "gpipe", "none")[0]


def measure(
    models: list[str], ranks: list[int], schedules: list[str], recomputations: list[str],
    timeout_s: float, console: Console,
) -> Iterator[Cell]:  # fmt: skip
    """Every cell, model by model."""
    for model in models:
        reference = plain_step(model)
        first: dict[tuple[int, ...], Reference] = {}
        for pp, schedule, recompute in product(ranks, schedules, recomputations):
            if recompute == "none" and schedule in ALWAYS_RECOMPUTES:
                continue
            start_s = time.perf_counter()
            cell = Cell(model, pp, schedule, recompute)
            try:
                found = run_ranks(pp, train_step, model, pp, schedule, recompute,
                                  timeout_s=timeout_s)  # fmt: skip
                own, rank_of = found[0]
                error = worst_difference(own, [r.losses for r, _ in found], reference, BOUND)
                before = first.setdefault(rank_of, own)
                cell = dataclasses.replace(cell, error=error, unequal=first_inequality(own, before))
            except RankError as failure:
                refused = isinstance(failure.__cause__, CutError)
                text = str(failure.__cause__ if refused else failure)
                cell = dataclasses.replace(cell, **{"refused" if refused else "failed": text})
            except RankTimeoutError as failure:
                cell = dataclasses.replace(cell, failed=str(failure))
            cell = dataclasses.replace(cell, seconds=time.perf_counter() - start_s)
            if not cell.passed:
                console.print(f"{cell}", markup=False)
            yield cell


def cells_table(cells: list[Cell]) -> Table:
    """A row a schedule and recomputation, a column a model and number of ranks."""
    columns = list(dict.fromkeys((c.model, c.pp) for c in cells))
    table = Table(title="Largest relative error of loss and gradients in float64, dropout on")
    table.add_column("schedule")
    table.add_column("recompute")
    for model, pp in columns:
        table.add_column(f"{model}\np = {pp}", justify="right")
    found = {(c.schedule, c.recompute, c.model, c.pp): c for c in cells}
    for schedule, recompute in dict.fromkeys((c.schedule, c.recompute) for c in cells):
        row = [found.get((schedule, recompute, *column)) for column in columns]
        table.add_row(schedule, recompute, *map(_text, row))
    return table


def _text(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    if cell.refused:
        return "[yellow]refused[/]"
    if cell.error is None:
        return "[red]failed[/]"
    text = f"{cell.error.error:.0e}" + (" not bit-equal" if cell.unequal else "")
    return f"[{'green' if cell.passed else 'red'}]{text}[/]"


def main(
    models: Annotated[str, typer.Option(help="Comma-separated.")] = TRIED,
    ranks: Annotated[str, typer.Option(help="Numbers of pipeline ranks.")] = "2,4",
    schedules: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(NAMES),
    recompute: Annotated[str, typer.Option(help="Comma-separated.")] = RECOMPUTATIONS,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Also write the figures here.")
    ] = None,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds per cell.")] = 120.0,
) -> None:
    """Compares schedules with one process; exits with 1 where a bound is exceeded."""
    torch.set_num_threads(1)
    console = Console(width=150)
    cells = list(
        measure(
            models.split(","), [int(p) for p in ranks.split(",")], schedules.split(","),
            recompute.split(","), timeout_s, console,
        )
    )  # fmt: skip
    console.print(cells_table(cells))
    good = all(cell.passed for cell in cells)
    failed = sum(not cell.passed for cell in cells)
    refused = sum(bool(cell.refused) for cell in cells)
    console.print(f"{'passed' if good else 'FAILED'}: {len(cells)} cells, {failed} failed, "
                  f"{refused} refused")  # fmt: skip
    if json_path is not None:
        body = {"passed": good, "cells": [dataclasses.asdict(c) for c in cells]}
        json_path.write_text(json.dumps(body, indent=1) + "\n")
    raise typer.Exit(0 if good else 1)


if __name__ == "__main__":
    typer.run(main)
