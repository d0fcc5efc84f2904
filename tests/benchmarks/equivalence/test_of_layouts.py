"""The table: cells pass, fail or are refused, and the exit code says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import merakc
from benchmarks.equivalence.cells import BOUND
from benchmarks.equivalence.of_layouts import LayoutCell, main, measure_cell
from benchmarks.models import MODELS
from merakc.equality.compare import Difference
from tests.benchmarks.stand_in import stand_in


def _run(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(main)
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "120"})
    return result.exit_code, result.output


def test_cells_pass_within_their_own_bound_only() -> None:
    layout = (1, 1, 1)
    near = Difference(BOUND, "w")
    assert LayoutCell("m", layout, error=near, cast_error=Difference(1e-6, "w")).passed
    assert not LayoutCell("m", layout, error=Difference(2 * BOUND, "w")).passed
    assert not LayoutCell("m", layout, error=Difference(float("nan"), "w")).passed
    assert not LayoutCell("m", layout, cast_error=Difference(1e-4, "w")).passed
    assert not LayoutCell("m", layout, error=near, unequal="w").passed
    assert not LayoutCell("m", layout, failed="died").passed
    assert LayoutCell("m", layout, refused="no such layout").passed


def test_casting_models_are_compared_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    product = stand_in(MODELS["llama"].valid_labels)
    monkeypatch.setattr(merakc, "auto_parallel", product, raising=False)
    cell = measure_cell(LayoutCell("llama", (2, 1, 1)), None, 60)
    assert cell.error is not None
    assert cell.error.error < BOUND
    assert cell.cast_error is not None
    assert BOUND < cell.cast_error.error < 1e-5
    assert not cell.unequal
    assert cell.passed


def test_the_command_passes_and_writes_its_figures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    product = stand_in(MODELS["vit"].valid_labels)
    monkeypatch.setattr(merakc, "auto_parallel", product, raising=False)
    path = tmp_path / "cells.json"
    code, output = _run("--models", "vit", "--layouts", "1,1,1;2,1,1", "--json", str(path))
    assert code == 0, output
    body = json.loads(path.read_text())
    assert body["passed"]
    assert [c["layout"] for c in body["cells"]] == [[1, 1, 1], [2, 1, 1]]


def test_the_command_fails_on_too_many_refusals_and_gives_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    product = stand_in(MODELS["vit"].valid_labels)
    monkeypatch.setattr(merakc, "auto_parallel", product, raising=False)
    code, output = _run("--models", "vit", "--layouts", "1,2,1")
    assert code == 1
    assert "refused: ShardError: the stand-in knows no tp" in output


def test_the_command_fails_on_wrong_gradients_and_names_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    product = stand_in(MODELS["vit"].valid_labels, scale=1.001)
    monkeypatch.setattr(merakc, "auto_parallel", product, raising=False)
    code, output = _run("--models", "vit", "--layouts", "1,1,1")
    assert code == 1
    assert "gradient of step" in output
