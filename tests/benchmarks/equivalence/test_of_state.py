"""The tables and the command; what they measure has tests of its own."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

from benchmarks.equivalence import of_state
from benchmarks.equivalence.of_state import COLUMNS, cell_texts, equality_texts
from benchmarks.equivalence.state_cells import Equality, StateCell
from benchmarks.resident_state import Held
from merakc.equality.compare import Difference
from merakc.ir.state import StateShards

HELD = Held({0: 1000}, 8000, 8000, 16000, gathered_bytes=4000)
CELL = StateCell("gpt2", "tp = 2", (StateShards(),), error=Difference(1e-15, "loss"), held=(HELD,))


def test_a_row() -> None:
    texts = cell_texts(CELL)
    assert len(texts) == len(COLUMNS)
    assert texts[4:] == ["1e-15", "0.00%", "0.00%", "0.00%", "0", "0.50", "0.00"]
    stages = StateShards(1, 1, 4), StateShards(4, 4, 4)
    assert cell_texts(StateCell("gpt2", "pp = 2", stages))[2] == "1, 1, 4 | 4, 4, 4"


def test_complaints() -> None:
    far = dataclasses.replace(CELL, error=Difference(1e-3, "weight of w"))
    assert far.complaint == "weight of w differs by 1.00e-03"
    heavy = dataclasses.replace(CELL, held=(dataclasses.replace(HELD, optimizer_bytes=20000),))
    assert heavy.complaint == "the bytes of optimizer by 25.00%"
    assert dataclasses.replace(CELL, failed="rank 1 died").complaint == "rank 1 died"


def test_equalities_by_model_and_micro_batches() -> None:
    points = StateShards(), StateShards(1, 1, 2)
    found = [
        Equality("vit", p, 1, unequal=unequal)
        for p, unequal in zip(points, ("", "weight a"), strict=True)
    ]
    assert equality_texts(found) == [
        ["model", "micro-batches", "1, 1, 1", "1, 1, 2"], ["vit", "1", "equal", "weight a"],
    ]  # fmt: skip


@pytest.mark.parametrize("unequal", ["", "gradient of step 0 of w: 1e-17"])
def test_the_command(unequal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    equality = Equality("gpt2", StateShards(1, 1, 2), 2, unequal=unequal)
    monkeypatch.setattr(of_state, "measure_cell", lambda *_: CELL)
    monkeypatch.setattr(of_state, "measure_equality", lambda *_: equality)
    app = Typer()
    app.command()(of_state.main)
    page, figures = tmp_path / "page.md", tmp_path / "found.json"
    args = ["--quick", "--models", "gpt2", "--doc", str(page), "--json", str(figures)]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == bool(unequal), done.output
    assert len(json.loads(figures.read_text())["cells"]) == 5
    assert "| gpt2 | tp = 2 | 1, 1, 1 |  | 1e-15 |" in page.read_text()
    assert (unequal or "equal") in page.read_text()
