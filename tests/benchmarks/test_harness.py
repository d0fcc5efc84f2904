"""The options, tables and files of benchmarks."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
from rich.console import Console

from benchmarks.harness import finish, in_a_folder, known, markdown, rich_table, tracked

ROWS = [["model", "error"], ["a|b", "[red]1[/]"]]


@dataclass(frozen=True)
class Figure:
    seconds: float


def test_names_are_checked() -> None:
    assert known("", {"a": 1, "b": 2}, "--models") == ["a", "b"]
    assert known("b", ("a", "b"), "--models") == ["b"]
    with pytest.raises(typer.BadParameter, match="c not known; choose of a, b"):
        known("a,c", ("a", "b"), "--models")


def test_paths_are_checked_before_hours_are_over(tmp_path: Path) -> None:
    assert in_a_folder(None) is None
    assert in_a_folder(tmp_path / "a.json") == tmp_path / "a.json"
    with pytest.raises(typer.BadParameter, match=r"there is no folder .*b; make it"):
        in_a_folder(tmp_path / "b" / "a.json")


def test_a_table_for_people_and_for_a_page() -> None:
    page = io.StringIO()
    Console(file=page, width=60).print(rich_table(ROWS, title="Errors"))
    assert "Errors" in page.getvalue()
    assert "a|b" in page.getvalue()
    assert markdown(ROWS) == "| model | error |\n| --- | --- |\n| a·b | 1 |"
    assert markdown(ROWS, left=1) == "| model | error |\n| --- | ---: |\n| a·b | 1 |"


def test_items_are_counted() -> None:
    page = io.StringIO()
    assert list(tracked([1, 2], str, Console(file=page))) == [1, 2]
    assert "2/2" in page.getvalue()


@pytest.mark.parametrize("passed", [True, False])
def test_the_end(passed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures, doc = tmp_path / "figures.json", tmp_path / "page.md"
    with pytest.raises(typer.Exit) as left:
        finish(
            Console(), passed, "2 cells", json_path=figures, figures=[Figure(1.5)], doc=doc,
            page=lambda: "a page",
        )  # fmt: skip
    assert left.value.exit_code == (not passed)
    assert capsys.readouterr().out == f"{'passed' if passed else 'FAILED'}: 2 cells\n"
    assert json.loads(figures.read_text()) == [{"seconds": 1.5}]
    assert doc.read_text() == "a page"
