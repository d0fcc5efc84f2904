"""The benchmark of schedules: its rows, what it holds against them, and its exit status."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import schedules
from benchmarks.schedules import (
    EXPECTED,
    LISTED,
    PIECES,
    Row,
    auto_row,
    best_listed,
    listed_row,
    table_of,
    uneven_rows,
)

EFFORT = 20_000


@pytest.mark.parametrize("row", LISTED, ids=lambda row: row[0])
def test_figures_known_from_theory(row: tuple[str, str, int, str]) -> None:
    for ranks, m in ((4, 8), (8, 32)):
        found = listed_row(row, ranks, m)
        assert found.passed
        assert found.exact == ((ranks, m) in EXPECTED.get(row[0], {}))
        assert found.bound <= found.makespan


def test_every_expected_figure_has_a_row() -> None:
    assert EXPECTED.keys() <= {label for label, *_ in LISTED}


def test_limits() -> None:
    row = Row("x", 4, 8, makespan=30.0, bound=24.0, peak=2.0, limit=30.0, expected_peak=2.0)
    assert row.passed
    assert not dataclasses.replace(row, makespan=30.1).passed
    assert dataclasses.replace(row, makespan=29.0).passed
    exact = dataclasses.replace(row, exact=True)
    assert exact.passed
    assert not dataclasses.replace(exact, makespan=29.0).passed
    assert not dataclasses.replace(exact, peak=1.0).passed


def test_only_rows_that_no_other_beats_are_held_against_auto() -> None:
    rows = [Row(name, 4, 8, t, 0.0, peak) for name, t, peak in (("a", 30, 2), ("b", 25, 4))]
    rows += [Row(name, 4, 8, t, 0.0, peak) for name, t, peak in (("c", 31, 3), ("d", 25, 5))]
    assert [row.name for row in best_listed(rows)] == ["a", "b"]


def test_auto_keeps_its_cap() -> None:
    row = auto_row(4, 8, 1.5, 34.0, EFFORT)
    assert row.passed
    assert row.peak <= 1.5
    assert row.bound <= row.makespan


def test_uneven_stages_hold_all_layers() -> None:
    before, after = uneven_rows(4, 16, 1.3, EFFORT)
    # 1F1B waits for the last stage, with its head, and for the others once.
    assert before.makespan == pytest.approx(3 * (16 * 1.5 + 1 + 1 + 1.05))
    # No less than all the work, shared out evenly, and the way to the last rank.
    assert after.makespan > 3 * 16 * (4 + 0.5 + 0.05) / 4 + 1.5
    assert after.passed
    assert PIECES % 2 == 0


def test_a_missed_figure_is_named_and_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    app = typer.Typer()
    app.command()(schedules.main)
    monkeypatch.setattr(schedules, "ROUNDS", (2,))
    monkeypatch.setattr(schedules, "UNEVEN", ())
    monkeypatch.setattr(schedules, "SPEED", ((2, 2, 60.0),))
    arguments = ["--ranks", "4", "--effort", "2000", "--json", str(tmp_path / "found.json")]
    for limit, code in ((40.0, 0), (24.0, 1)):
        monkeypatch.setattr(schedules, "CAPPED", {(4, 8): {4.0: limit}})
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == code, result.output
        assert ("MISSED: auto, cap 4" in result.output) == bool(code)
        assert ("FAILED" in result.output) == bool(code)
        body = json.loads((tmp_path / "found.json").read_text())
        assert body["passed"] == (code == 0)
        assert [row["name"] for row in body["tables"]["p = 4, m = 8"]][:2] == [
            "GPipe",
            "1F1B, recomputing late",
        ]
        assert body["speed"][0]["seconds"] > 0
    monkeypatch.setattr(schedules, "CAPPED", {})
    monkeypatch.setattr(schedules, "SPEED", ((2, 2, 0.0),))
    assert CliRunner().invoke(app, arguments).exit_code == 1


def test_the_table_says_what_was_asked() -> None:
    table = table_of("t", [Row("a", 4, 8, 30.0, 24.0, 2.0, 29.0), Row("b", 4, 8, 30.0, 24.0, 2.0)])
    assert [list(column.cells) for column in table.columns][-2:] == [["≤ 29", ""], ["MISSED", ""]]
