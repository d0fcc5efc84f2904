"""The tables and the command; what they measure has tests of its own."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

from benchmarks import state_equivalence
from benchmarks.layouts import Difference
from benchmarks.resident_state import Held
from benchmarks.state_cells import Cell, Equality
from benchmarks.state_equivalence import COLUMNS, cell_texts, complaint, equality_texts
from merakc.ir.state import StateShards

HELD = Held({0: 1000}, 8000, 8000, 16000, gathered_bytes=4000)
CELL = Cell("gpt2", "tp = 2", (StateShards(),), error=Difference(1e-15, "loss"), held=(HELD,))


def test_a_row() -> None:
    texts = cell_texts(CELL)
    assert len(texts) == len(COLUMNS)
    assert texts[4:] == ["1e-15", "0.00%", "0.00%", "0.00%", "0", "0.50", "0.00"]
    stages = StateShards(1, 1, 4), StateShards(4, 4, 4)
    assert cell_texts(Cell("gpt2", "pp = 2", stages))[2] == "1, 1, 4 | 4, 4, 4"


def test_complaints() -> None:
    far = dataclasses.replace(CELL, error=Difference(1e-3, "weight of w"))
    assert complaint(far) == "weight of w differs by 1.00e-03"
    heavy = dataclasses.replace(CELL, held=(dataclasses.replace(HELD, optimizer_bytes=20000),))
    assert complaint(heavy) == "the bytes of optimizer by 25.00%"
    assert complaint(dataclasses.replace(CELL, failed="rank 1 died")) == "rank 1 died"


def test_equalities_by_model_and_micro_batches() -> None:
    points = StateShards(), StateShards(1, 1, 2)
    found = [
        Equality("vit", p, 1, unequal) for p, unequal in zip(points, ("", "weight a"), strict=True)
    ]
    assert equality_texts(found) == [
        ["model", "micro-batches", "1, 1, 1", "1, 1, 2"], ["vit", "1", "equal", "weight a"],
    ]  # fmt: skip


@pytest.mark.parametrize("unequal", ["", "gradient of step 0 of w: 1e-17"])
def test_the_command(unequal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    equality = Equality("gpt2", StateShards(1, 1, 2), 2, unequal)
    monkeypatch.setattr(state_equivalence, "measure_cell", lambda *_: CELL)
    monkeypatch.setattr(state_equivalence, "measure_equality", lambda *_: equality)
    app = Typer()
    app.command()(state_equivalence.main)
    page, figures = tmp_path / "page.md", tmp_path / "found.json"
    args = ["--quick", "--models", "gpt2", "--doc", str(page), "--json", str(figures)]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == bool(unequal), done.output
    assert len(json.loads(figures.read_text())["cells"]) == 5
    assert "| gpt2 | tp = 2 | 1, 1, 1 |  | 1e-15 |" in page.read_text()
    assert (unequal or "equal") in page.read_text()
