"""Communication under computation changes no result.

Models with dropout on run one step with the communication of their tensor parallelism overlapped,
whole or in parts of micro-batches, in float64, with and without pipeline stages and sequence
parallelism; or with every product that can be in one op with the collective beside it. Loss and
every gradient are compared with one process that overlaps nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Annotated, Any

import typer
from rich.console import Console
from torch import nn

import merakc
from benchmarks.equivalence.cells import BOUND, Cell, conclude, grid, run_cell, train_step
from benchmarks.harness import JsonPath, rich_table
from benchmarks.layouts import worst_difference
from benchmarks.models import Batch
from benchmarks.ranks import run_ranks
from benchmarks.zoo_models import ZOO
from merakc.costs.work.flops import COLLECTIVES, PIPELINED
from merakc.equality.compare import Reference
from merakc.machines.cluster import NOMINAL_CPU
from merakc.train.model import ParallelModel

TRIED = "gpt2,llama,qwen3,t5,bert,vit,mixtral,whisper,deepseek_v3,nn_transformer"
LAYOUTS = "2,1;4,1;2,2;4,2"  # tp, pp
PARTS = "1,2,4"
MICRO_BATCHES = 2
FUSED = -1  # in the place of a number of parts: products in one op with their collectives
TITLE = "Largest relative error of loss and gradients in float64, dropout on"


@dataclass(frozen=True)
class OverlapCell(Cell):
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

    @property
    def passed(self) -> bool:
        """Whether everything is within its bound, and every stage ran in the form asked for."""
        if self.parts == FUSED:
            return self.near and self.fused > 0
        return self.near and set(self.sub_batches) == {self.parts} and self.started > 0

    @property
    def complaint(self) -> str:
        """What is wrong, or that the step did not run in the form asked for."""
        return super().complaint or "did not overlap as asked" * (not self.passed)

    @property
    def figures(self) -> list[str]:
        """The error, and the parts that stages run where others were asked for."""
        other = set(self.sub_batches) != {1 if self.parts == FUSED else self.parts}
        found = super().figures
        return [*found, *[str(self.sub_batches)] * bool(found and other)]


def step_of(
    model: str, tp: int, pp: int, parts: int, sequence_parallel: bool
) -> tuple[Reference, dict[str, Any]]:
    """One rank's part of a step, and how it ran; collective."""

    def made(source: Callable[[], nn.Module], batch: Batch) -> ParallelModel:
        def compiled(**options: Any) -> ParallelModel:
            return merakc.auto_parallel(
                source(), batch, dp=1, tp=tp, pp=pp, micro_batches=MICRO_BATCHES, schedule="1f1b",
                recompute="none", sequence_parallel=sequence_parallel, cluster=NOMINAL_CPU,
                **options,
            )  # fmt: skip

        parallel = compiled(overlap=1 if parts == FUSED else parts)
        if parts != FUSED:
            return parallel
        whole = parallel.plan
        return compiled(plan=replace(whole, fused_products=tuple(sorted(whole.parameters))))

    result, parallel = train_step(ZOO[model], made)
    (step,) = parallel._own("_steps").compiled.values()
    graphs = [g for c in step.chunks.values() for g in (c.forward, c.backward) if g is not None]
    ops = [node.op for graph in graphs for node in graph.nodes]
    started = sum(op.startswith("start.") for op in ops)
    fused = sum(op in PIPELINED for op in ops)
    collectives = started + fused + sum(op in COLLECTIVES for op in ops)
    return result, {
        "sub_batches": parallel.plan.sub_batches,
        "started": started,
        "collectives": collectives,
        "fused": fused,
    }


@cache
def plain_step(model: str) -> Reference:
    """The same step in this process.

    Random numbers are merakc's, which torch's own dropout does not draw: the table of layouts
    compares this with eager training where nothing is drawn.
    """
    return step_of(model, 1, 1, 0, False)[0]


def measure(
    models: list[str],
    layouts: list[tuple[int, int]],
    parts: list[int],
    sequence_parallel: list[bool],
    timeout_s: float,
) -> Iterator[OverlapCell]:
    """Every cell, model by model."""
    for model, (tp, pp), sequence, count in product(models, layouts, sequence_parallel, parts):
        key = model, tp, pp, count, sequence

        def compare(key: tuple[str, int, int, int, bool] = key) -> dict[str, Any]:
            model, tp, pp, *_ = key
            found = run_ranks(tp * pp, step_of, *key, timeout_s=timeout_s)
            first, ran = found[0]
            losses = [result.losses for result, _ in found]
            return ran | {"error": worst_difference(first, losses, plain_step(model), BOUND)}

        yield run_cell(OverlapCell(*key), compare)


def cells_rows(cells: list[OverlapCell]) -> list[list[str]]:
    """A row a model, a column a layout and number of parts."""

    def head(cell: OverlapCell) -> str:
        form = "fused" if cell.parts == FUSED else f"k = {cell.parts}"
        return f"tp {cell.tp} pp {cell.pp}{' sp' * cell.sequence_parallel}\n{form}"

    return grid(cells, lambda c: [c.model], head, ["model"], head)


def main(
    models: Annotated[str, typer.Option(help="Comma-separated.")] = TRIED,
    layouts: Annotated[str, typer.Option(help="tp,pp pairs.")] = LAYOUTS,
    parts: Annotated[str, typer.Option(help="Of a micro-batch; 1: whole; -1: fused.")] = PARTS,
    sequence_parallel: Annotated[bool, typer.Option(help="With sequence parallelism too.")] = False,
    json_path: JsonPath = None,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds per cell.")] = 300.0,
) -> None:
    """Compares overlapped steps with one process; exits with 1 where a bound is exceeded."""
    console = Console(width=190)
    chosen = [(int(tp), int(pp)) for tp, pp in (text.split(",") for text in layouts.split(";"))]
    forms = [False, True] if sequence_parallel else [False]
    counts = [int(k) for k in parts.split(",")]
    cells = list(measure(models.split(","), chosen, counts, forms, timeout_s))
    console.print(rich_table(cells_rows(cells), title=TITLE))
    conclude(console, cells, json_path)
