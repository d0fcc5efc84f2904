"""The coverage page: cells are equal, refused or wrong, and the exit code says so."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import typer
from torch import nn
from typer.testing import CliRunner

import benchmarks.zoo as zoo
import merakc
from benchmarks.models import ModelCase
from benchmarks.zoo import BOUND, Cell, Row, main, measure_cell, page, passes, trace
from benchmarks.zoo_models.batches import samples
from merakc.equality.compare import Difference
from merakc.errors import RecordError
from tests.benchmarks.stand_in import stand_in


class _Small(nn.Module):
    """A linear model; with `peek`, its control flow depends on what it computes."""

    def __init__(self, peek: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.peek = peek

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.peek and self.linear(x).isfinite().all():
            x = x * 2
        return {"loss": self.linear(x).roll(1, 1).pow(2).mean()}


def _case(peek: bool) -> ModelCase:
    return ModelCase(
        "small",
        lambda _: _Small(peek),
        lambda size, generator: {"x": torch.randn(size, 4, generator=generator)},
        samples,
    )


@pytest.fixture(autouse=True)
def _models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo, "ZOO", {"small": _case(False), "peeking": _case(True)})
    zoo._reference.cache_clear()


def _run(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(main)
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "120"})
    return result.exit_code, result.output


def test_a_cell_is_equal_refused_or_wrong() -> None:
    assert Cell(Difference(BOUND, "w")).equal
    assert Cell(Difference(2 * BOUND, "w")).wrong
    assert Cell(Difference(float("nan"), "w")).wrong
    refused = Cell(reason="no", refused=True)
    assert not refused.equal
    assert not refused.wrong


def test_passes_allows_a_red_cell_in_forty_but_no_wrong_one() -> None:
    green, red = Cell(Difference(0.0, "w")), Cell(reason="no")
    wrong = Cell(Difference(1.0, "w"))
    others = dict.fromkeys(map(str, range(39)), green)
    assert passes([Row("m", cells={**others, "x": red})])
    assert not passes([Row("m", cells={**others, "x": wrong})])
    assert not passes([Row("m", cells={"1": green, "x": red})])


def test_a_trace_knows_size_and_time() -> None:
    row = trace("small")
    assert row.parameters == 20
    assert row.nodes > 2
    assert row.trace_s > 0
    assert trace("peeking") == Row("peeking", 20)


def test_a_cell_gives_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = measure_cell("peeking", "traces", 60)
    assert cell.refused
    assert cell.reason.startswith(RecordError.__name__)
    monkeypatch.setattr(merakc, "auto_parallel", stand_in(samples))
    cell = measure_cell("small", "tp=2", 60)
    assert cell.refused
    assert "the stand-in knows no tp" in cell.reason


def test_a_crash_is_a_reason_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object, **__: object) -> None:
        raise KeyError("lost")

    monkeypatch.setattr(merakc, "auto_parallel", crash)
    cell = measure_cell("small", "traces", 60)
    assert not cell.refused
    assert cell.reason.startswith("KeyError: 'lost' (File ")
    assert "in crash" in cell.reason


def test_wrong_gradients_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merakc, "auto_parallel", stand_in(samples, scale=1.001))
    cell = measure_cell("small", "traces", 60)
    assert cell.wrong
    assert "gradient of step 0 of linear" in cell.reason


def test_the_command_writes_page_and_figures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(merakc, "auto_parallel", stand_in(samples))
    figures, doc = tmp_path / "zoo.json", tmp_path / "zoo.md"
    arguments = ("--only", "small", "--json", str(figures), "--doc", str(doc))
    code, output = _run(*arguments, "--cells", "traces,pp=2")
    assert code == 0, output
    assert json.loads(figures.read_text())[0]["cells"]["pp=2"]["error"]["error"] < BOUND
    assert "[1/1] small: " in output
    assert "passed: 2 of 2 cells (100.0 %) of 1 models are equal" in output
    assert "| small | ✓ | ✓ | 20 |" in doc.read_text()
    code, output = _run(*arguments, "--cells", "traces,tp=2")
    assert code == 1
    assert "FAILED: 1 of 2 cells (50.0 %)" in output
    assert re.search(r"\| small \| ✓ \| ✗ \| 20 \|.*\| 1 \|$", doc.read_text(), re.MULTILINE)
    assert "1. ShardError: the stand-in knows no tp" in doc.read_text()


def test_the_documentation_has_the_page_of_all_models_and_cells_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(merakc, "auto_parallel", stand_in(samples))
    monkeypatch.setattr(zoo, "CELLS", {"traces": (1, 1, 1)})
    monkeypatch.setattr(zoo, "PAGE", tmp_path / "zoo.md")
    _run("--cells", "traces", "--only", "small")
    assert not zoo.PAGE.exists()
    code, output = _run("--cells", "traces")
    assert code == 0, output
    assert "| small | ✓ |" in zoo.PAGE.read_text()


def test_a_stopped_run_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figures, doc = tmp_path / "zoo.json", tmp_path / "zoo.md"
    monkeypatch.setattr(merakc, "auto_parallel", stand_in(samples))
    arguments = ("--json", str(figures), "--doc", str(doc), "--cells", "traces,tp=2")
    _run(*arguments, "--only", "small")
    before = zoo.load(figures)["small"]
    assert before.cells["traces"].equal
    assert before.cells["tp=2"].refused
    measured: list[str] = []

    def measure(model: str, cells: list[str], timeout_s: float) -> Row:
        measured.append(model)
        return Row(model, cells=dict.fromkeys(cells, Cell(Difference(0.0, "w"))))

    monkeypatch.setattr(zoo, "measure_row", measure)
    _run(*arguments, "--resume")
    assert measured == ["peeking"]
    assert zoo.load(figures)["small"] == before
    assert list(zoo.load(figures)) == ["small", "peeking"]
    _run(*arguments, "--only", "peeking", "--resume")
    assert list(zoo.load(figures)) == ["small", "peeking"]  # none is lost
    _run(*arguments, "--only", "small")
    assert measured == ["peeking", "small"]


def test_unknown_models_and_cells_are_refused() -> None:
    for option, known in (("--only", "small, peeking"), ("--cells", "traces, tp=2")):
        code, output = _run(option, "no-such")
        assert code == 2
        assert "no-such not known; choose of" in output
        assert known in output


def test_the_page_lists_whole_ops_by_op() -> None:
    ops = ("aten.roll.default at a.py:1", "aten.roll.default at a.py:2")
    text = page([Row("m", 1, 0.0, 1, ops, {"traces": Cell(Difference(1.0, "w"), "off")})])
    assert "- `aten.roll.default`: m\n" in text
    assert "| m | **wrong** | 1 | 0.00 | 1 | 2 | 1 |" in text


def test_a_reason_is_one_line_without_paths_of_this_machine() -> None:
    reason = 'KeyError: 1\n (File "/opt/env/lib/site-packages/torch/x.py", line 2, in f)'
    text = page([Row("m", cells={"traces": Cell(reason=reason)})])
    assert '1. KeyError: 1 (File "site-packages/torch/x.py", line 2, in f)\n' in text
