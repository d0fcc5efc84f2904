"""`python -m benchmarks.zoo`: which models train in which layouts, unchanged, and why not.

Every model of the zoo is trained for one step in five layouts, in float64, and its loss, every
gradient and every weight and buffer are compared with the plain model in one process. The float32
casts in a model's own code are lifted to float64 on both sides, so that 1e-10 can be asked of all.
A run of the whole zoo writes the coverage page of the documentation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from pydantic import TypeAdapter
from rich.console import Console

from benchmarks.harness import DocPath, JsonPath, finish, known, markdown, write_json
from benchmarks.layouts import Task, train_layout, worst_difference
from benchmarks.ranks import RankError, RankTimeoutError, run_ranks
from benchmarks.reference import split_batch, step_batch, train_reference
from benchmarks.reports import one_line
from benchmarks.zoo_models import ZOO
from merakc.equality.compare import Difference, Reference
from merakc.errors import MerakError, RecordError, ShardError
from merakc.frontend.record import record
from merakc.ir.program import Mesh
from merakc.lowering.lowered import training_graph
from merakc.machines.cluster import NOMINAL_CPU
from merakc.passes.sharding.shard import shard

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
MIN_EQUAL_SHARE = 0.97
PACKAGES = ("merakc", "torch", "transformers", "diffusers", "x-transformers")
PAGE = Path(__file__).parent.parent / "docs" / "zoo.md"


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

    What cannot be recorded has parameters, and no time and no nodes.
    """
    case = ZOO[model]
    module = case.model()
    parameters = sum(p.numel() for p in module.parameters())
    batch = split_batch(step_batch(case, BATCH_SIZE, torch.float32, 0), MICRO_BATCHES)[0]
    start_s = time.perf_counter()
    try:
        recording = record(module, (), batch)
    except RecordError:
        return Row(model, parameters)  # its first cell says why
    trace_s = time.perf_counter() - start_s
    graph = training_graph(recording.graph)
    try:
        whole = shard(graph, 2).whole_ops(graph)
    except ShardError:
        whole = ()  # the cell with tp = 2 says why
    return Row(model, parameters, trace_s, len(graph.nodes), whole)


def measure_row(model: str, cells: list[str], timeout_s: float) -> Row:
    """Traces a model and trains it in every layout, on forked ranks."""
    try:
        row = run_ranks(1, trace, model, timeout_s=timeout_s)[0]
    except (RankError, RankTimeoutError):
        row = Row(model)
    return dataclasses.replace(row, cells={c: measure_cell(model, c, timeout_s) for c in cells})


def measure_cell(model: str, cell: str, timeout_s: float) -> Cell:
    """Trains one step in one layout and compares."""
    case, mesh = ZOO[model], Mesh(*CELLS[cell])
    # A rank alone measures its computes on values of no meaning; more of them would take as long
    # for that as for all else.
    cluster = NOMINAL_CPU if mesh.world_size > 1 else None
    task = Task(case, mesh, BATCH_SIZE, MICRO_BATCHES, 1, lift_casts=True, cluster=cluster)
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
        ZOO[model], batch_size=BATCH_SIZE, micro_batches=MICRO_BATCHES, steps=1, lift_casts=True,
        dp=dp,
    )  # fmt: skip


def _last_lines(details: str) -> str:
    """The exception of a traceback, and the line of code that raised it."""
    lines = details.strip().splitlines()
    frames = [line.strip() for line in lines if line.lstrip().startswith("File ")]
    return f"{lines[-1]} ({frames[-1]})" if frames else lines[-1]


def passes(rows: list[Row]) -> bool:
    """Whether 97 % of the cells are equal, and none is wrong without having said so."""
    cells = [cell for row in rows for cell in row.cells.values()]
    equal = sum(cell.equal for cell in cells)
    return equal >= MIN_EQUAL_SHARE * len(cells) and not any(cell.wrong for cell in cells)


def measure_all(
    models: list[str], cells: list[str], timeout_s: float, done: Mapping[str, Row]
) -> Iterator[Row]:
    """Every row, in order; those that are `done` are taken."""
    for model in models:
        kept = done.get(model)
        if kept is not None and list(kept.cells) == cells:
            yield kept
        else:
            yield measure_row(model, cells, timeout_s)
            _reference.cache_clear()


def load(path: Path) -> dict[str, Row]:
    """The rows that `--json` has written, by model; none where there is no such file."""
    rows = json.loads(path.read_text()) if path.exists() else []
    return {row.model: row for row in TypeAdapter(list[Row]).validate_python(rows)}


def progress(row: Row, done: int, total: int) -> str:
    """A line for the model, and one for each of its reasons."""
    parts = [f"[{done}/{total}] {row.model}:"]
    for name, cell in row.cells.items():
        state = f"{cell.error.error:.0e}" if cell.error else "✗"
        parts.append(f"{name} {'WRONG ' if cell.wrong else ''}{state} ({cell.seconds:.1f} s)")
    reasons = dict.fromkeys(cell.reason for cell in row.cells.values() if cell.reason)
    return "\n    ".join(["  ".join(parts), *reasons])


def summary(rows: list[Row]) -> str:
    """How many cells there are of each kind."""
    cells = [cell for row in rows for cell in row.cells.values()]
    equal, wrong = sum(c.equal for c in cells), sum(c.wrong for c in cells)
    share = 100 * equal / max(len(cells), 1)
    return (
        f"{equal} of {len(cells)} cells ({share:.1f} %) of {len(rows)} models are equal to one "
        f"process, {len(cells) - equal - wrong} are refused or failed, {wrong} are wrong"
    )


def page(rows: list[Row]) -> str:
    """The coverage page of the documentation, with when and on what it was measured."""
    wall_s = sum(row.trace_s + sum(cell.seconds for cell in row.cells.values()) for row in rows)
    names = list(dict.fromkeys(name for row in rows for name in row.cells))
    reasons = list(dict.fromkeys(c.reason for r in rows for c in r.cells.values() if c.reason))
    head = ["model", *names, "parameters", "trace s", "nodes", "ops without rules", "why not"]
    lines = [head]
    for row in rows:
        numbers = {reasons.index(c.reason) + 1: None for c in row.cells.values() if c.reason}
        figures = [f"{row.parameters:,}", f"{row.trace_s:.2f}", row.nodes, len(row.whole_ops) or ""]
        why = ", ".join(map(str, numbers))
        marks = [_mark(row.cells[name]) for name in names]
        lines.append([row.model, *marks, *map(str, figures), why])
    notes = "\n".join(f"{k}. {one_line(reason)}" for k, reason in enumerate(reasons, 1))
    return f"""# Which models train in which layouts

Generated by `python -m benchmarks.zoo`, {datetime.date.today()}, {os.cpu_count()} CPU cores, gloo,
{_versions()},
{wall_s:.0f} s in all.

{summary(rows)}.

Equal are the loss, every gradient, and every weight and buffer after one AdamW step, in float64, to
{BOUND:.0e} of the largest element ({BATCH_SIZE} samples in {MICRO_BATCHES} micro-batches, against
the whole batch at once, in which batch norms alone see each micro-batch by itself; the casts
to float32 in a model's own code are lifted to float64 on both sides). The models are tiny, their
code is the stock code, and nothing in merakc knows any of them. Dropout and other draws are off,
since the reference is torch's own eager model, which draws from another generator.

"traces" is dp × tp × pp = 1 × 1 × 1, "2×2×2" is eight ranks. ✓ is equal, ✗ refused or failed, with
the number of the reason in the last column; **wrong** is different from one process. *Trace s* are
the seconds in which one micro-batch is recorded, *nodes* the operations found. *Ops without rules*
counts the places in the model whose operations are computed whole on every tp rank.

{markdown(lines)}

## Why not

{notes or "Every cell is equal."}

## Ops without rules

{_whole_ops(rows) or "None."}
"""


def _versions() -> str:
    found = []
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join(found)


def _mark(cell: Cell) -> str:
    return "✓" if cell.equal else "**wrong**" if cell.wrong else "✗"


def _whole_ops(rows: list[Row]) -> str:
    """The ops, with the models that have them."""
    found: dict[str, list[str]] = {}
    for row in rows:
        for op in dict.fromkeys(line.partition(" at ")[0] for line in row.whole_ops):
            found.setdefault(op, []).append(row.model)
    return "\n".join(f"- `{op}`: {', '.join(models)}" for op, models in sorted(found.items()))


def main(
    only: Annotated[str, typer.Option(help="Comma-separated models; all if empty.")] = "",
    cells: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(CELLS),
    json_path: JsonPath = None,
    doc: DocPath = None,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds per cell.")] = 300.0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Takes the rows that --json's file has already.")
    ] = False,
) -> None:
    """Measures the coverage; exits with 1 where under 97 % of cells are equal, or one is wrong.

    A run of all models writes the page of the documentation.
    """
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torch|transformers|diffusers")
    transformers.logging.set_verbosity_error()
    console = Console()
    chosen = known(only, ZOO, "--only")
    columns = known(cells, CELLS, "--cells")
    if doc is None and (chosen, columns) == (list(ZOO), list(CELLS)):
        doc = PAGE
    rows: list[Row] = []
    done = load(json_path) if resume and json_path is not None else {}
    for row in measure_all(chosen, columns, timeout_s, done):
        rows.append(row)
        text = progress(row, len(rows), len(chosen))
        console.print(text, markup=False, highlight=False, soft_wrap=True)
        if json_path is not None:
            kept = done | {r.model: r for r in rows}  # what is yet to come, too
            write_json(json_path, [*kept.values()])
    finish(console, passes(rows), summary(rows), doc=doc, page=lambda: page(rows))


if __name__ == "__main__":
    typer.run(main)
