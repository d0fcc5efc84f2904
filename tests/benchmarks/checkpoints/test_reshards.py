"""A trial that goes right, and what is said of one that does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.checkpoints import reshards
from benchmarks.checkpoints.runs import Layout
from merakc.ir.program import Mesh
from merakc.train.checkpoints.convert import Contents
from tests.battery.small_models import warm_up


def test_trials_are_of_all_models_and_precisions() -> None:
    trials = reshards.random_reshards(21, 0, 2)
    assert len({(t.model, t.first.precision) for t in trials}) == 21
    assert all(t.last.mesh.world_size <= 2 for t in trials)


def test_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    warm_up()
    one = Layout(Mesh(1, 1, 1))
    trial = reshards.Reshard("llama", Layout(Mesh(1, 2, 1)), one, Layout(Mesh(2, 1, 1), "zero-3"))
    assert reshards.problem(trial) == ""
    read = reshards.read_contents

    def other(path: Path) -> Contents:
        found = read(path)
        if path.name == "last":
            found.tensors = {name: t + 1 for name, t in found.tensors.items()}
        return found

    monkeypatch.setattr(reshards, "read_contents", other)
    assert "is another after it was moved" in reshards.problem(trial)
