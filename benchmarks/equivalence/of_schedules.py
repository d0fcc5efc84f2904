"""Every order of work trains as one process does.

Models with dropout on run one step under every schedule and every setting of recomputation, in
float64, on several pipeline ranks. The loss and every gradient are compared with one process, and
bit by bit between schedules that add up in the same order: those with the same stages on the same
ranks, whatever is recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Annotated, Any

import typer
from rich.console import Console

import merakc
from benchmarks.equivalence.cells import BOUND, Cell, conclude, grid, run_cell, train_step
from benchmarks.harness import JsonPath, rich_table
from benchmarks.layouts import first_inequality, worst_difference
from benchmarks.models import MODELS
from benchmarks.ranks import run_ranks
from merakc.equality.compare import Reference
from merakc.errors import CutError
from merakc.machines.cluster import NOMINAL_CPU
from merakc.schedules.registry import NAMES

TRIED = "gpt2,llama,t5,bert,resnet"
RECOMPUTATIONS = "none,stage,full,selective"
MICRO_BATCHES = 8
ALWAYS_RECOMPUTES = ("merak",)
TITLE = "Largest relative error of loss and gradients in float64, dropout on"


@dataclass(frozen=True)
class ScheduleCell(Cell):
    """One model under one schedule and recomputation on `pp` ranks.

    It must equal the cells before, bit by bit, that add up in the same order.
    """

    model: str
    pp: int
    schedule: str
    recompute: str


def step_of(
    model: str, pp: int, schedule: str, recompute: str
) -> tuple[Reference, tuple[int, ...]]:
    """One rank's part of a step; collective. Also the ranks of the stages."""
    result, parallel = train_step(
        MODELS[model],
        lambda source, batch: merakc.auto_parallel(
            source(), batch, pp=pp, micro_batches=MICRO_BATCHES, schedule=schedule,
            recompute=recompute, cluster=NOMINAL_CPU,
        ),
    )  # fmt: skip
    return result, parallel.plan.rank_of


@cache
def plain_step(model: str) -> Reference:
    """The same step in this process, on one stage.

    Random numbers are merakc's, which torch's own dropout does not draw: the table of layouts
    compares this with eager training where nothing is drawn.
    """
    return step_of(model, 1, "gpipe", "none")[0]


def measure(
    models: list[str], ranks: list[int], schedules: list[str], recomputations: list[str],
    timeout_s: float,
) -> Iterator[ScheduleCell]:  # fmt: skip
    """Every cell, model by model."""
    first: dict[tuple[str, tuple[int, ...]], Reference] = {}
    for key in product(models, ranks, schedules, recomputations):
        model, pp, schedule, recompute = key
        if recompute != "stage" and schedule in ALWAYS_RECOMPUTES:
            continue

        def compare(key: tuple[str, int, str, str] = key) -> dict[str, Any]:
            model, pp, *_ = key
            found = run_ranks(pp, step_of, *key, timeout_s=timeout_s)
            own, rank_of = found[0]
            losses = [result.losses for result, _ in found]
            before = first.setdefault((model, rank_of), own)
            error = worst_difference(own, losses, plain_step(model), BOUND)
            return {"error": error, "unequal": first_inequality(own, before)}

        yield run_cell(ScheduleCell(model, pp, schedule, recompute), compare, (CutError,))


def cells_rows(cells: list[ScheduleCell]) -> list[list[str]]:
    """A row a schedule and recomputation, a column a model and number of ranks."""
    return grid(
        cells, lambda c: [c.schedule, c.recompute], lambda c: (c.model, c.pp),
        ["schedule", "recompute"], lambda c: f"{c.model}\np = {c.pp}",
    )  # fmt: skip


def main(
    models: Annotated[str, typer.Option(help="Comma-separated.")] = TRIED,
    ranks: Annotated[str, typer.Option(help="Numbers of pipeline ranks.")] = "2,4",
    schedules: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(NAMES),
    recompute: Annotated[str, typer.Option(help="Comma-separated.")] = RECOMPUTATIONS,
    json_path: JsonPath = None,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds per cell.")] = 120.0,
) -> None:
    """Compares schedules with one process; exits with 1 where a bound is exceeded."""
    console = Console(width=150)
    counts = [int(p) for p in ranks.split(",")]
    asked = models.split(","), counts, schedules.split(","), recompute.split(",")
    cells = list(measure(*asked, timeout_s))
    console.print(rich_table(cells_rows(cells), left=2, title=TITLE))
    conclude(console, cells, json_path)
