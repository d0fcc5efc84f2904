"""A walk that goes right, and what is said of one that does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.checkpoints import reshards
from benchmarks.checkpoints.runs import Layout
from merakc.ir.program import Mesh
from merakc.train.checkpoints.convert import Contents
from tests.battery.small_models import warm_up


def test_walks_are_of_all_models_and_precisions() -> None:
    walks = reshards.random_walks(21 * reshards.MOVES, 0, 2)
    assert len({(w.model, w.layouts[0].precision) for w in walks}) == 21
    assert all(w.layouts[0] == w.layouts[-1] for w in walks)
    assert all(layout.mesh.world_size <= 2 for w in walks for layout in w.layouts)


def test_a_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    warm_up()
    first, other = Layout(Mesh(1, 2, 1)), Layout(Mesh(2, 1, 1), "zero-3")
    walk = reshards.Walk("llama", (first, other, first))
    assert reshards.problems(walk) == ["", ""]
    read = reshards.read_contents

    def changed(path: Path) -> Contents:
        found = read(path)
        if path.name == "2":
            found.tensors = {name: t + 1 for name, t in found.tensors.items()}
        return found

    monkeypatch.setattr(reshards, "read_contents", changed)
    fine, wrong = reshards.problems(walk)
    assert fine == ""
    assert "is another after move 2" in wrong
