"""`python -m benchmarks.losses`: whether any loss formula is silently another in some layout.

Loss formulas as people write them, on a small model and eight samples with uneven labels, are run
for one step in every layout: one rank with micro-batches, a pipeline, dp ranks with uneven numbers
of samples, and, where it differs, tp with a pipeline. The loss and every gradient are compared in
float64 with the plain model in one process on the whole batch.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.harness import DocPath, JsonPath, finish, known, markdown, rich_table
from benchmarks.loss_cells import (
    BOUND,
    Cell,
    Layout,
    Verdict,
    judge,
    references,
    run_layout,
    warm_up,
)
from benchmarks.loss_formulas import FORMULAS, of_rules
from benchmarks.loss_formulas.formula import SAMPLES
from benchmarks.loss_sabotages import SABOTAGES
from benchmarks.reports import one_line, told_run
from benchmarks.sabotaged_losses import Line, measure, subjects
from benchmarks.sabotaged_losses import complaints as missed
from benchmarks.sabotaged_losses import summary as sabotage_summary
from benchmarks.sabotaged_losses import table as sabotage_rows
from merakc.ir.program import Mesh
from merakc.passes.batches.proof.certificate import LIMIT

# Where tp splits what the loss is made of: classes, words, features, parameters, similarities.
TP_FORMULAS = """
    ce ce_class_weight kl_batchmean bce_logits ce_flat nll2d triplet elbo focal uncertainty
    tokens_by_count router_z orthogonality class_weight_by_frequency targets_standardised info_nce
    clip nt_xent sup_con cox barlow_twins dice mmd imsat ohem balance_top2 balance_masked
    square_parameter eight_features softmax_of_transposed_samples flatten_and_back rmse
"""
LAYOUTS = (
    Layout("1 rank", Mesh(), 4),
    Layout("pp=2", Mesh(pp=2), 4),
    Layout("dp=2", Mesh(dp=2), 1, samples=(5, 3)),
    Layout("tp=2 × pp=2", Mesh(tp=2, pp=2), 4),
)
# What the last runs of the other benchmark gave; it runs by itself, on seeds that one chooses.
RANDOM = """2,000 examples each of seeds 1, 2 and 3
(2026-11-23) gave 1786, 1785 and 1755 equal losses, of seed 4 (2026-11-24) 1764, none wrong and none
crashed. Of the last 23 are refused; the ten that it shows follow from no layer at all."""
PAGE = Path(__file__).parent.parent / "docs" / "losses.md"
RED = (Verdict.WRONG, Verdict.CRASH)
TABLE_WIDTH = 130  # four layouts with up to four counts each


def cells_of(layout: Layout, names: Sequence[str]) -> list[str]:
    """The formulas of a layout: under tp, those where it makes a difference."""
    return [name for name in names if layout.mesh.tp == 1 or name in TP_FORMULAS.split()]


def measure_all(names: Sequence[str], layouts: Sequence[Layout], limit_s: float) -> Iterator[Cell]:
    """Every cell, layout by layout."""
    wanted = references(names, limit_s)
    for layout in layouts:
        for name, records in run_layout(layout, cells_of(layout, names), limit_s):
            yield judge(name, layout, records, wanted[name], limit_s)


def passes(cells: Sequence[Cell]) -> bool:
    """Whether no cell is wrong and none crashed."""
    return not any(cell.verdict in RED for cell in cells)


def summary(cells: Sequence[Cell]) -> str:
    """How many cells there are of each kind."""
    formulas = len({cell.formula for cell in cells})
    found = Counter(cell.verdict for cell in cells)
    counts = ", ".join(f"{found[v]} {v}" for v in Verdict)
    share = 100 * found[Verdict.EQUAL] / max(len(cells), 1)
    return f"{counts} of {len(cells)} cells of {formulas} formulas: {share:.1f} % equal"


def count_rows(cells: Sequence[Cell]) -> list[list[str]]:
    """The head of the table, a row for each family, and one for all."""
    layouts = list(dict.fromkeys(cell.layout for cell in cells))
    rows = [["family", "formulas", *layouts]]
    for family in (*dict.fromkeys(cell.family for cell in cells), "all"):
        own = [cell for cell in cells if family in (cell.family, "all")]
        counts = [Counter(c.verdict for c in own if c.layout == layout) for layout in layouts]
        texts = [", ".join(f"{n[v]} {v}" for v in Verdict if n[v]) for n in counts]
        rows.append([family, str(len({cell.formula for cell in own})), *texts])
    return rows


def table(cells: Sequence[Cell]) -> Table:
    """The counts by family and layout."""
    return rich_table(count_rows(cells), title="Loss and gradients against one process")


def complaints(cells: Sequence[Cell]) -> list[str]:
    """A line for each cell that is not equal; layouts of one formula and reason share theirs."""
    lines: dict[tuple[str, Verdict, str], list[str]] = {}
    for cell in sorted(cells, key=lambda c: list(reversed(Verdict)).index(c.verdict)):
        if cell.verdict is not Verdict.EQUAL:
            key = cell.formula, cell.verdict, one_line(cell.reason)
            lines.setdefault(key, []).append(cell.layout)
    return [
        f"{formula} ({', '.join(layouts)}): {verdict}: {reason}"
        for (formula, verdict, reason), layouts in lines.items()
    ]


def sabotaged(console: Console) -> list[Line]:
    """Every sabotage of the algebra, printed."""
    recorded = list(subjects([*FORMULAS.values(), *of_rules.FORMULAS]))
    lines = []
    with console.status("") as status:
        for line in measure(SABOTAGES, recorded):
            lines.append(line)
            status.update(f"{len(lines)} sabotages: {line.sabotage.of}")
    rows = sabotage_rows(lines)
    console.print(rich_table(rows, title="What sees that a rule is wrong, by formulas"))
    for text in (*missed(lines), sabotage_summary(lines)):
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    return lines


def told_sabotages(lines: Sequence[Line]) -> str:
    """The section of the page on rules that are wrong, if any were tried."""
    if not lines:
        return ""
    return f"""## When a rule is wrong

Each kind of rule of the algebra is replaced by a wrong one in turn, and every formula that it
reaches is analysed, certified and run in this process, in four even parts and in 5 and 3 samples.
The numbers are of formulas; of both splits the worse one counts. Seen by the *shapes*: both
recordings contradict the claim, which then counts as coupled. By the *certificate*: `auto_parallel`
refuses. By *another check, or an error*: the claim breaks what is made of it, before the step or at
it. *Changes nothing*: the step is the same, since the wrong rule is weaker than the right one, or
makes no difference in that formula. *Missed*: another loss or gradient, by more than {LIMIT:.0e},
without a word. {len(of_rules.FORMULAS)} losses beside those below reach the other rules.

{sabotage_summary(lines)}.

{markdown(sabotage_rows(lines))}

{"Missed: " + "; ".join(missed(lines)) + "." if missed(lines) else "None is missed."}"""


def page(
    cells: Sequence[Cell], lines: Sequence[Line], arguments: Sequence[str], wall_s: float
) -> str:
    """The page of the documentation."""
    counts = markdown(count_rows(cells))
    others = "\n".join(f"- {line}" for line in complaints(cells)) or "Every cell is equal."
    families = dict.fromkeys(cell.family for cell in cells)
    names = "\n".join(
        f"- {family}: "
        + ", ".join(dict.fromkeys(f"`{c.formula}`" for c in cells if c.family == family))
        for family in families
    )
    return f"""# Which losses are those of one process

{told_run("benchmarks.losses", arguments)} {wall_s:.0f} s in all.

{summary(cells)}.

Each formula is a loss on the features of a small model, with a batch of {SAMPLES} samples whose
labels, masks and weights lie unevenly: some micro-batches hold none. *Equal* are the loss on every
rank and every gradient, in float64, to {BOUND:.0e} of the largest element, with those of the plain
model in one process on the whole batch; where random numbers are drawn, with those of merakc on one
rank in one micro-batch. *Refused* is an error of merakc's that says why. *Wrong* is another loss or
gradient without a word, *crash* any other error, and a step that does not end. "1 rank" and "pp=2"
run 4 micro-batches, the ranks of "dp=2" have 5 and 3 samples, and "tp=2 × pp=2" runs the formulas
whose classes, words, features or parameters tp splits.

{counts}

## Cells that are not equal

{others}

{told_sabotages(lines)}

## Losses drawn at random

`python -m benchmarks.random_losses` draws trees of sums, means, products, guards, counts and
couplings, and compares each with one process. {RANDOM}

## The formulas

{names}
"""


def main(
    only: Annotated[str, typer.Option(help="Comma-separated formulas; all if empty.")] = "",
    layouts: Annotated[str, typer.Option(help="Comma-separated layouts; all if empty.")] = "",
    json_path: JsonPath = None,
    doc: DocPath = None,
    limit_s: Annotated[float, typer.Option("--timeout", help="Seconds per cell.")] = 60.0,
    sabotage: Annotated[
        bool, typer.Option(help="Only break the algebra's rules, and see what sees it.")
    ] = False,
) -> None:
    """Compares every formula with one process; exits with 1 where one is wrong or crashes.

    A run of everything writes the page of the documentation.
    """
    start_s = time.perf_counter()
    torch.set_num_threads(1)
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    if sabotage:
        raise typer.Exit(1 if missed(sabotaged(console)) else 0)
    names = known(only, FORMULAS, "--only")
    by_name = {layout.name: layout for layout in LAYOUTS}
    chosen = known(layouts, by_name, "--layouts")
    everything = (names, chosen) == (list(FORMULAS), list(by_name))
    if doc is None and everything:
        doc = PAGE
    warm_up()
    cells = []
    with console.status("") as status:
        for cell in measure_all(names, [by_name[name] for name in chosen], limit_s):
            cells.append(cell)
            status.update(f"{len(cells)} cells, {cell.layout}: {cell.formula}")
    wall_s = time.perf_counter() - start_s
    console.print(table(cells))
    for line in complaints(cells):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    lines = sabotaged(console) if everything and doc is not None else []
    finish(
        console, passes(cells), f"{summary(cells)}, {wall_s:.0f} s",
        json_path=json_path, figures={"wall_s": wall_s, "cells": cells},
        doc=doc, page=lambda: page(cells, lines, sys.argv[1:], wall_s),
    )  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
