"""Every layout trains exactly as one process does.

Ten models in nine layouts of up to eight ranks, in float64: the loss of each step, every gradient
of each step and every weight and buffer after the last are compared with a plain run in one
process, and the training is repeated and must be bit-equal. Models whose own code casts to float32
are compared twice: as they are, to 1e-5, and with those casts lifted on both sides, to 1e-10.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.equivalence.cells import BATCH_SIZE, BOUND, Cell, conclude, grid, run_cell
from benchmarks.expert_loops import EXPERT_LOOPS
from benchmarks.harness import DocPath, JsonPath, markdown, rich_table, tracked
from benchmarks.layouts import Task, train_layout, train_twice, worst_difference
from benchmarks.models import EQUIVALENCE_MODELS, MODELS
from benchmarks.packed import PACKED
from benchmarks.ranks import run_ranks
from benchmarks.reference import train_reference
from benchmarks.reports import told_run
from benchmarks.zoo_models import ZOO
from merakc.equality.compare import Difference, Reference
from merakc.errors import MerakError
from merakc.ir.program import Mesh
from merakc.passes.sharding.sequences import heads, rings

# (dp, tp, pp)
LAYOUTS = "1,1,1;2,1,1;1,2,1;1,1,2;1,1,4;2,2,1;1,2,2;2,1,2;2,2,2"
CASES = {**ZOO, **MODELS, **EXPERT_LOOPS, **PACKED}
MICRO_BATCHES = 4
STEPS = 3
CAST_BOUND = 1e-5  # float32 has seven digits, and four layers of sums lose two
MAX_REFUSED_SHARE = 5 / 90
TABLE_WIDTH = 150  # nine layouts with two figures each


@dataclass(frozen=True)
class LayoutCell(Cell):
    """One model in one layout. `cast_error` is of the run with the model's float32 casts kept.

    `layout` are the ranks of dp, of the `axis`, of pp, and, where the axis is cp or ep, perhaps of
    tp. There dp shards the optimizer's state.
    """

    model: str
    layout: tuple[int, ...]
    cast_error: Difference | None = None
    axis: str = "tp"

    @property
    def mesh(self) -> Mesh:
        """The ranks."""
        dp, ranks, pp, *tp = self.layout
        if self.axis == "tp":
            return Mesh(dp, ranks, pp)
        return Mesh(dp, *(tp or (1,)), pp, cp=ranks, experts=self.axis == "ep")

    @property
    def passed(self) -> bool:
        """Whether nothing that was measured exceeds its bound."""
        cast = self.cast_error is None or self.cast_error.error <= CAST_BOUND
        return cast and not (self.failed or self.unequal or (self.error and not self.near))

    @property
    def figures(self) -> list[str]:
        """Both errors, the one with casts in brackets."""
        cast = [f"({self.cast_error.error:.0e})"] if self.cast_error is not None else []
        error, *others = super().figures or [""]
        return [*[error] * bool(error), *cast, *others]

    @property
    def complaint(self) -> str:
        """What is wrong; of a cell with casts, what differs most in both runs."""
        cast = self.cast_error
        texts = [super().complaint]
        if cast is not None and not cast.error <= CAST_BOUND:
            texts.append(f"with casts, {cast.name} differs by {cast.error:.2e}")
        return "; ".join(filter(None, texts))


def measure_cell(cell: LayoutCell, lift: bool | None, timeout_s: float) -> LayoutCell:
    """Trains one cell on forked ranks; `lift` picks one of the two comparisons, None both."""
    casts = CASES[cell.model].casts_float32
    if lift is not False or not casts:
        cell = run_cell(cell, partial(_compare_twice, cell, casts, timeout_s), (MerakError,))
    if casts and lift is not True and not (cell.refused or cell.failed):
        cell = run_cell(cell, partial(_compare_casts, cell, timeout_s), (MerakError,))
    return cell


def _compare_twice(cell: LayoutCell, lift: bool, timeout_s: float) -> dict[str, Any]:
    """The difference from the reference, and between two runs."""
    task = _task(cell, lift)
    pairs = run_ranks(task.mesh.world_size, train_twice, task, timeout_s=timeout_s)
    unequal = next((text for _, text in pairs if text), "")
    results = [result for result, _ in pairs]
    return {"error": _difference(cell, lift, results, BOUND), "unequal": unequal}


def _compare_casts(cell: LayoutCell, timeout_s: float) -> dict[str, Any]:
    """The difference from the reference, with the model's casts on both sides."""
    task = _task(cell, lift=False)
    results = run_ranks(task.mesh.world_size, train_layout, task, timeout_s=timeout_s)
    return {"cast_error": _difference(cell, False, results, CAST_BOUND)}


def _task(cell: LayoutCell, lift: bool) -> Task:
    mesh = cell.mesh
    shards = "zero-1" if mesh.dp > 1 and cell.axis != "tp" else None
    return Task(CASES[cell.model], mesh, BATCH_SIZE, MICRO_BATCHES, STEPS, lift,
                state_shards=shards)  # fmt: skip


def _difference(
    cell: LayoutCell, lift: bool, results: Sequence[Reference], bound: float
) -> Difference:
    dp = cell.layout[0] if CASES[cell.model].running_statistics else 1
    losses = [result.losses for result in results]
    return worst_difference(results[0], losses, _reference(cell.model, lift, dp), bound)


@cache
def _reference(model: str, lift: bool, dp: int) -> Reference:
    return train_reference(
        CASES[model],
        batch_size=BATCH_SIZE,
        micro_batches=MICRO_BATCHES,
        steps=STEPS,
        lift_casts=lift,
        dp=dp,
    )


def cells_rows(cells: Sequence[LayoutCell]) -> list[list[str]]:
    """Models by layouts: the largest error, and beside it the one with float32 casts kept."""
    return grid(
        cells, lambda c: [c.model], lambda c: c.layout, ["model"],
        lambda c: "·".join(map(str, c.layout)),
    )  # fmt: skip


def document(cells: Sequence[LayoutCell], wall_s: float) -> str:
    """The table as a page of the documentation, with when and on what it was measured."""
    refusals = dict.fromkeys(f"{c.model} {c.layout}: {c.refused}" for c in cells if c.refused)
    notes = "\n".join(f"- {reason}" for reason in refusals) or "No cell refused."
    axis, about = cells[0].axis, told_run("benchmarks.equivalence", sys.argv[1:])
    return f"""# Every layout trains as one process does

{about} {wall_s:.0f} s in all, over gloo.

The largest relative error in float64 of the loss of each step, every gradient of each step, and
every weight and buffer after {STEPS} AdamW steps, against the plain model in one process on the
whole batch ({BATCH_SIZE} samples, trained in {MICRO_BATCHES} micro-batches; batch norms normalise
over each of these in both, by convention). Columns are dp·{axis}·pp. In brackets: with the casts to
float32 that the model's own code makes; without brackets those casts are lifted to float64 on both
sides. Every training ran twice and was compared bit by bit.

{markdown(cells_rows(cells))}

{notes}
"""


def main(
    models: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(EQUIVALENCE_MODELS),
    layouts: Annotated[str, typer.Option(help="dp,tp,pp;dp,tp,pp;...")] = LAYOUTS,
    axis: Annotated[
        str, typer.Option(help="tp, or cp or ep, after which tp may come as well.")
    ] = "tp",
    json_path: JsonPath = None,
    lift: Annotated[
        bool | None,
        typer.Option("--lift/--no-lift", help="Only with float32 casts lifted, or only without."),
    ] = None,
    doc: DocPath = None,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds per training.")] = 120.0,
    exchange_price: Annotated[
        float,
        typer.Option(help="Of cp: what bytes exchanged for heads count, beside those gathered."),
    ] = heads.EXCHANGE_PRICE,
    ring_price: Annotated[
        float,
        typer.Option(help="Of cp: what passing keys around counts, beside other forms."),
    ] = rings.RING_PRICE,
) -> None:
    """Compares layouts with one process; exits with 1 where a bound is exceeded."""
    start_s = time.perf_counter()
    heads.EXCHANGE_PRICE, rings.RING_PRICE = exchange_price, ring_price
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    chosen = [_parse_layout(text) for text in layouts.split(";")]
    names = models.split(",")
    planned = [LayoutCell(*pair, axis=axis) for pair in product(names, chosen)]
    described = tracked(planned, lambda c: f"{c.model} {c.layout}", console)
    cells = [measure_cell(cell, lift, timeout_s) for cell in described]
    title = "Largest relative error in float64 (with the model's own float32 casts)"
    caption = f"columns: dp·{axis}·pp; every training repeated once and compared bit by bit"
    console.print(rich_table(cells_rows(cells), title=title, caption=caption))
    wall_s = time.perf_counter() - start_s
    conclude(
        console, cells, json_path, most_refused=MAX_REFUSED_SHARE, doc=doc,
        page=partial(document, cells, wall_s),
    )  # fmt: skip


def _parse_layout(text: str) -> tuple[int, ...]:
    dp, ranks, pp, *tp = map(int, text.split(","))
    return dp, ranks, pp, *tp
