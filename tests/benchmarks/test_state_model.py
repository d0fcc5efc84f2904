"""The cost model of sharded state against published figures."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
from typer import Typer
from typer.testing import CliRunner

from benchmarks import state_model
from benchmarks.state_model import MAX_ERROR, Constants, errors, published


def test_every_published_row_is_predicted() -> None:
    assert len(published()) == 32
    assert np.abs(errors(Constants())).max() <= MAX_ERROR


def test_the_constants_matter() -> None:
    """The bound is not one that any constants keep."""
    slow = dataclasses.replace(Constants(), network_latency_us=0.0)
    assert np.abs(errors(slow)).max() > MAX_ERROR


def test_the_command(tmp_path: Path) -> None:
    app = Typer()
    app.command()(state_model.main)
    done = CliRunner().invoke(app, ["--json", str(tmp_path / "found.json")])
    assert done.exit_code == 0, done.output
    picks = json.loads((tmp_path / "found.json").read_text())["picks"]
    for found in picks:
        assert found["picked_s"] <= found["published_s"]
