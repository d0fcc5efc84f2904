"""The study of ZeRO's stages, on its smallest model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

from benchmarks.zero_study import __main__ as zero_study
from benchmarks.zero_study.__main__ import NODES, SIZES, build, predict, zero
from benchmarks.zero_study.measured import SMALL, Row
from merakc.ir.state import StateShards
from tests.benchmarks.zero_study.test_measured import rows


def test_stages_are_points_of_the_lattice() -> None:
    expected = [(1, 1, 1), (1, 1, 16), (1, 16, 16), (16, 16, 16)]
    assert [zero(stage, 16) for stage in range(4)] == [StateShards(*e) for e in expected]


def test_the_model_has_the_published_parameters() -> None:
    model = build(SIZES[0])
    assert model.parameters == pytest.approx(580e6, rel=0.01)
    held = [predict(model, stage, 1).memory_bytes for stage in range(4)]
    assert held == sorted(held, reverse=True)


def test_the_command(tmp_path: Path) -> None:
    app = Typer()
    app.command()(zero_study.main)
    path = tmp_path / "found.json"
    args = ["--json", str(path), "--models", "580M", "--small", ""]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.output
    assert len(json.loads(path.read_text())["predicted"]) == 4 * len(NODES)


@pytest.mark.parametrize("third_s", [2.0, 0.5])
def test_measured_models_decide_too(third_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def measured(*args: object) -> list[list[Row]]:
        seen.append(args)
        return [rows(third_s)]

    monkeypatch.setattr(zero_study, "measure", measured)
    app = Typer()
    app.command()(zero_study.main)
    done = CliRunner().invoke(app, ["--models", "", "--small", "2M", "--rounds", "3"])
    assert done.exit_code == (third_s < 1), done.output
    assert seen == [(list(SMALL[:1]), 3)]
