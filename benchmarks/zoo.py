"""`python -m benchmarks.zoo`: which models train in which layouts, unchanged, and why not.

Every model of the zoo is trained for one step in five layouts, in float64, and its loss, every
gradient and every weight and buffer are compared with the plain model in one process. The float32
casts in a model's own code are lifted to float64 on both sides, so that 1e-10 can be asked of all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from benchmarks.layouts import Difference, Task, train_layout, worst_difference
from benchmarks.ranks import RankError, RankTimeoutError, run_ranks
from benchmarks.reference import Reference, split_batch, step_batch, train_reference
from benchmarks.zoo_models import ZOO
from merakc.errors import MerakError, ShardError
from merakc.frontend.record import record
from merakc.ir.program import Mesh
from merakc.passes.shard import shard
from merakc.planner import training_graph

# name -> (dp, tp, pp)
CELLS = {
    "traces": (1, 1, 1),
    "tp=2": (1, 2, 1),
    "pp=2": (1, 1, 2),
    "pp=4": (1, 1, 4),
    "2×2×2": (2, 2, 2),
}
BATCH_SIZE = 8
MICRO_BATCHES = 4
BOUND = 1e-10
MIN_EQUAL_SHARE = 0.95
PACKAGES = ("merakc", "torch", "transformers", "diffusers", "x-transformers")


@dataclass(frozen=True, slots=True)
class Cell:
    """One model in one layout: how far it is from one process, or why there is nothing to compare.

    `refused` says that merakc itself gave the reason; another failure is a fault of ours.
    """

    error: Difference | None = None
    reason: str = ""
    refused: bool = False
    seconds: float = 0.0

    @property
    def equal(self) -> bool:
        """Whether the layout trained exactly as one process does."""
        return self.error is not None and self.error.error <= BOUND

    @property
    def wrong(self) -> bool:
        """Whether the layout trained differently and nobody said so."""
        return self.error is not None and not self.equal


@dataclass(frozen=True, slots=True)
class Row:
    """One model: its size, how long recording took, the ops that tp leaves whole, its cells."""

    model: str
    parameters: int = 0
    trace_s: float = 0.0
    nodes: int = 0
    whole_ops: tuple[str, ...] = ()
    cells: dict[str, Cell] = field(default_factory=dict)


def trace(model: str) -> Row:
    """Records one micro-batch of a float32 model, as its users would; runs on one rank.

    Raises what recording raises.
    """
    case = ZOO[model]
    module = case.model()
    batch = split_batch(step_batch(case, BATCH_SIZE, torch.float32, 0), MICRO_BATCHES)[0]
    start_s = time.perf_counter()
    recording = record(module, (), batch)
    trace_s = time.perf_counter() - start_s
    graph = training_graph(recording.graph)
    try:
        whole = shard(graph, 2).whole_ops(graph)
    except ShardError:
        whole = ()  # the cell with tp = 2 says why
    parameters = sum(p.numel() for p in module.parameters())
    return Row(model, parameters, trace_s, len(graph.nodes), whole)


def measure_row(model: str, cells: list[str], timeout_s: float) -> Row:
    """Traces a model and trains it in every layout, on forked ranks."""
    try:
        row = run_ranks(1, trace, model, timeout_s=timeout_s)[0]
    except (RankError, RankTimeoutError):
        row = Row(model)  # its first cell says why
    return dataclasses.replace(row, cells={c: measure_cell(model, c, timeout_s) for c in cells})


def measure_cell(model: str, cell: str, timeout_s: float) -> Cell:
    """Trains one step in one layout and compares."""
    case, mesh = ZOO[model], Mesh(*CELLS[cell])
    task = Task(case, mesh, BATCH_SIZE, MICRO_BATCHES, 1, lift_casts=True)
    start_s = time.perf_counter()
    try:
        results = run_ranks(mesh.world_size, train_layout, task, timeout_s=timeout_s)
    except RankError as error:
        cause = error.__cause__
        refused = isinstance(cause, MerakError)
        reason = f"{type(cause).__name__}: {cause}" if refused else _last_lines(error.details)
        found = Cell(reason=reason, refused=refused)
    except RankTimeoutError as error:
        found = Cell(reason=str(error))
    else:
        reference = _reference(model, mesh.dp if case.running_statistics else 1)
        losses = [result.losses for result in results]
        found = Cell(worst_difference(results[0], losses, reference, BOUND))
        if found.wrong and found.error is not None:
            reason = f"{found.error.name} differs by {found.error.error:.1e}"
            found = dataclasses.replace(found, reason=reason)
    return dataclasses.replace(found, seconds=time.perf_counter() - start_s)


@cache
def _reference(model: str, dp: int) -> Reference:
    return train_reference(
        ZOO[model],
        batch_size=BATCH_SIZE,
        micro_batches=MICRO_BATCHES,
        steps=1,
        lift_casts=True,
        dp=dp,
    )


def _last_lines(details: str) -> str:
    """The exception of a traceback, and the line of code that raised it."""
    lines = details.strip().splitlines()
    frames = [line.strip() for line in lines if line.lstrip().startswith("File ")]
    return f"{lines[-1]} ({frames[-1]})" if frames else lines[-1]


def passes(rows: list[Row]) -> bool:
    """Whether 95 % of the cells are equal, and none is wrong without having said so."""
    cells = [cell for row in rows for cell in row.cells.values()]
    equal = sum(cell.equal for cell in cells)
    return equal >= MIN_EQUAL_SHARE * len(cells) and not any(cell.wrong for cell in cells)


def measure_all(models: list[str], cells: list[str], timeout_s: float) -> Iterator[Row]:
    """Every row, in order."""
    for model in models:
        yield measure_row(model, cells, timeout_s)


def page(rows: list[Row], wall_s: float) -> str:
    """The coverage page of the documentation, with when and on what it was measured."""
    names = list(dict.fromkeys(name for row in rows for name in row.cells))
    cells = [cell for row in rows for cell in row.cells.values()]
    equal = sum(cell.equal for cell in cells)
    reasons = list(dict.fromkeys(c.reason for c in cells if c.reason))
    head = ["model", *names, "parameters", "trace s", "nodes", "ops kept whole"]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        marks = [_mark(row.cells[name], reasons) for name in names]
        whole = len(row.whole_ops) or ""
        figures = [f"{row.parameters:,}", f"{row.trace_s:.2f}", row.nodes, whole]
        lines.append([row.model, *marks, *map(str, figures)])
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    notes = "\n".join(f"{k}. {reason}" for k, reason in enumerate(reasons, 1))
    return f"""# Which models train in which layouts

`python -m benchmarks.zoo`, {datetime.date.today()}, {os.cpu_count()} CPU cores, gloo,
{_versions()},
{wall_s:.0f} s in all.

{equal} of {len(cells)} cells are equal to one process: the loss, every gradient, and every weight
and buffer after one AdamW step, in float64, to {BOUND:.0e} of the largest element ({BATCH_SIZE}
samples in {MICRO_BATCHES} micro-batches; the casts to float32 in a model's own code are lifted to
float64 on both sides). The models are tiny, their code is the stock code, and nothing in merakc
knows any of them. "traces" is dp·tp·pp = 1·1·1, "2×2×2" is eight ranks; a number in a cell is that
of the reason below. *Ops kept whole* counts the lines of the model whose ops are computed whole on
every tp rank, for want of a sharding rule.

{table}

## Why not

{notes or "Every cell is equal."}

## Ops kept whole under tp

{_whole_ops(rows) or "None."}
"""


def _versions() -> str:
    found = []
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join(found)


def _mark(cell: Cell, reasons: list[str]) -> str:
    if cell.equal:
        return "✓"
    return f"{'**WRONG**' if cell.wrong else '✗'} {reasons.index(cell.reason) + 1}"


def _whole_ops(rows: list[Row]) -> str:
    """The ops, with the models that have them."""
    found: dict[str, list[str]] = {}
    for row in rows:
        for op in dict.fromkeys(line.partition(" at ")[0] for line in row.whole_ops):
            found.setdefault(op, []).append(row.model)
    return "\n".join(f"- `{op}`: {', '.join(models)}" for op, models in sorted(found.items()))


def main(
    models: Annotated[str, typer.Option(help="Comma-separated; all if empty.")] = "",
    cells: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(CELLS),
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Also write the figures here.")
    ] = None,
    doc: Annotated[Path | None, typer.Option(help="Also write the page here, as Markdown.")] = None,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds per cell.")] = 300.0,
) -> None:
    """Measures the coverage; exits with 1 where under 95 % of cells are equal, or one is wrong."""
    start_s = time.perf_counter()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torch|transformers|diffusers")
    console = Console()
    chosen = models.split(",") if models else list(ZOO)
    rows: list[Row] = []
    for row in measure_all(chosen, cells.split(","), timeout_s):
        rows.append(row)
        for name, cell in row.cells.items():
            state = f"{cell.error.error:.0e}" if cell.error else "-"
            text = f"{row.model} {name}: {state} {cell.seconds:.1f} s {cell.reason}"
            console.print(text, markup=False, highlight=False, soft_wrap=True)
        if json_path is not None:
            json_path.write_text(json.dumps([dataclasses.asdict(r) for r in rows], indent=1) + "\n")
    found = [cell for row in rows for cell in row.cells.values()]
    console.print(
        f"{'passed' if passes(rows) else 'FAILED'}: {len(found)} cells, "
        f"{sum(c.equal for c in found)} equal, {sum(c.wrong for c in found)} wrong"
    )
    if doc is not None:
        doc.write_text(page(rows, time.perf_counter() - start_s))
    raise typer.Exit(0 if passes(rows) else 1)


if __name__ == "__main__":
    typer.run(main)
