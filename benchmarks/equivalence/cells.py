"""The harness of the tables: cells are measured on forked ranks and shown in a grid."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from rich.console import Console
from torch import nn

from benchmarks.harness import finish
from benchmarks.models import Batch, ModelCase
from benchmarks.ranks import RankError, RankTimeoutError
from benchmarks.reference import step_batch
from merakc.equality.casts import lifted_casts
from merakc.equality.compare import Difference, Reference, split_state
from merakc.train.model import ParallelModel

BOUND = 1e-10
DROPOUT = 0.1
BATCH_SIZE = 8


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What a comparison came to.

    `unequal` names the first tensor that is not bit-equal to the one that it must equal.
    """

    error: Difference | None = None
    unequal: str = ""
    refused: str = ""
    failed: str = ""
    seconds: float = 0.0

    @property
    def near(self) -> bool:
        """Whether it was compared, and the error is within its bound."""
        return self.error is not None and self.error.error <= BOUND

    @property
    def passed(self) -> bool:
        """Whether it was refused, or ran and is right."""
        return bool(self.refused) or (self.near and not self.unequal and not self.failed)

    @property
    def figures(self) -> list[str]:
        """What is shown of a cell that was compared."""
        found = [f"{self.error.error:.0e}"] if self.error is not None else []
        return found + ["not bit-equal"] * bool(self.unequal)

    @property
    def text(self) -> str:
        """The cell in a table, with its colour."""
        if self.refused:
            return "[yellow]refused[/]"
        colour = "green" if self.passed else "red"
        return f"[{colour}]{' '.join(self.figures) or 'failed'}[/]"

    @property
    def complaint(self) -> str:
        """What is wrong, if anything is."""
        found = [self.failed] if self.failed else []
        if self.error is not None and not self.near:
            found.append(f"{self.error.name} differs by {self.error.error:.2e}")
        return "; ".join([*found, *[f"not bit-equal: {self.unequal}"] * bool(self.unequal)])


C = TypeVar("C", bound=Cell)


def run_cell(
    cell: C, measure: Callable[[], Mapping[str, Any]], refusals: tuple[type[Exception], ...] = ()
) -> C:
    """The cell with the fields that `measure` finds, or with the error of its ranks.

    The errors of `refusals` are refusals, and no failures.
    """
    start_s = time.perf_counter()
    try:
        found = measure()
    except (RankError, RankTimeoutError) as failure:
        cause = failure.__cause__
        if isinstance(cause, refusals):
            found = {"refused": f"{type(cause).__name__}: {cause}"}
        else:
            found = {"failed": str(failure)}
    return replace(cell, **found, seconds=cell.seconds + time.perf_counter() - start_s)


def grid(
    cells: Sequence[C], row: Callable[[C], Sequence[str]], column: Callable[[C], Hashable],
    heads: Sequence[str], head: Callable[[C], str],
) -> list[list[str]]:  # fmt: skip
    """The cells by row and column, under the names of both."""
    columns = {column(cell): head(cell) for cell in cells}
    texts = {(tuple(row(cell)), column(cell)): cell.text for cell in cells}
    return [
        [*heads, *columns.values()],
        *(
            [*name, *(texts.get((name, key), "-") for key in columns)]
            for name in dict.fromkeys(tuple(row(cell)) for cell in cells)
        ),
    ]


def train_step(
    case: ModelCase, make: Callable[[Callable[[], nn.Module], Batch], ParallelModel]
) -> tuple[Reference, ParallelModel]:
    """One rank's part of a step with dropout on in float64, and the model; collective.

    `make` compiles the model that a call of its first argument gives.
    """
    model = partial(case.model, torch.float64, dropout=DROPOUT)
    batch = step_batch(case, BATCH_SIZE, torch.float64, 0)
    with lifted_casts():
        parallel = make(model, batch)
        loss = parallel(**batch)["loss"]
        loss.backward()
    gradients = parallel.full_gradients()
    _, buffers = split_state(model(), parallel.full_state_dict())
    return Reference((loss.item(),), (gradients,), {}, buffers), parallel


def conclude(
    console: Console, cells: Sequence[Cell], json_path: Path | None, *, most_refused: float = 1.0,
    doc: Path | None = None, page: Callable[[], str] = str,
) -> NoReturn:  # fmt: skip
    """Prints what went wrong and the counts, writes the files, and exits.

    Not more than the share `most_refused` of the cells may be refused.
    """
    failed = sum(not cell.passed for cell in cells)
    refused = sum(bool(cell.refused) for cell in cells)
    for reason in dict.fromkeys(cell.refused for cell in cells if cell.refused):
        console.print(f"refused: {reason}", markup=False)
    for cell in cells:
        if not cell.passed:
            console.print(f"{cell.complaint}: {cell}", markup=False)
    good = not failed and refused <= most_refused * len(cells)
    text = f"{len(cells)} cells, {failed} failed, {refused} refused"
    figures = {"passed": good, "cells": cells}
    finish(console, good, text, json_path=json_path, figures=figures, doc=doc, page=page)
