"""What a table of cells shows, says and exits with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from rich.console import Console

from benchmarks.equivalence.cells import Cell, conclude, grid, run_cell
from benchmarks.ranks import RankError
from merakc.equality.compare import Difference
from merakc.errors import CutError

GOOD = Cell(error=Difference(1e-12, "w"))


def _raise(cause: Exception) -> dict[str, object]:
    raise RankError(0, "died") from cause


@pytest.mark.parametrize(
    ("cell", "text", "complaint"),
    [
        (GOOD, "[green]1e-12[/]", ""),
        (Cell(error=Difference(1e-3, "w")), "[red]1e-03[/]", "w differs by 1.00e-03"),
        (Cell(error=GOOD.error, unequal="b"), "[red]1e-12 not bit-equal[/]", "not bit-equal: b"),
        (Cell(failed="died"), "[red]failed[/]", "died"),
        (Cell(refused="no"), "[yellow]refused[/]", ""),
    ],
)
def test_a_cell(cell: Cell, text: str, complaint: str) -> None:
    assert (cell.text, cell.complaint) == (text, complaint)
    assert cell.passed == ("red]" not in text)


def test_errors_of_ranks_are_failures_or_refusals() -> None:
    assert run_cell(Cell(), lambda: {"unequal": "w"}).unequal == "w"
    assert run_cell(Cell(), lambda: _raise(CutError("no")), (CutError,)).refused == "CutError: no"
    assert run_cell(Cell(), lambda: _raise(CutError("no"))).failed == "rank 0 failed:\ndied"


def test_a_grid_has_a_dash_where_nothing_was_measured() -> None:
    cells = [GOOD, Cell(refused="no")]
    rows = grid(cells, lambda c: [c.text], lambda c: c.refused, ["row"], lambda c: c.refused or "-")
    assert rows == [
        ["row", "-", "no"],
        [GOOD.text, GOOD.text, "-"],
        [cells[1].text, "-", cells[1].text],
    ]


@pytest.mark.parametrize(
    ("cells", "most_refused", "code"),
    [
        ([GOOD, Cell(refused="no")], 0.5, 0),
        ([GOOD, Cell(refused="no")], 0.4, 1),
        ([GOOD, Cell(failed="died")], 1.0, 1),
    ],
)
def test_the_exit_code_and_the_files(
    cells: list[Cell], most_refused: float, code: int, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    figures, doc = tmp_path / "cells.json", tmp_path / "page.md"
    page: Callable[[], str] = lambda: "a page"  # noqa: E731
    with pytest.raises(typer.Exit) as left:
        conclude(Console(), cells, figures, most_refused=most_refused, doc=doc, page=page)
    assert left.value.exit_code == code
    assert ("passed: 2 cells" if code == 0 else "FAILED: 2 cells") in capsys.readouterr().out
    assert json.loads(figures.read_text())["passed"] == (code == 0)
    assert len(json.loads(figures.read_text())["cells"]) == 2
    assert doc.read_text() == "a page"
