"""A walk that goes right, and what is said of one that does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
    read, judge, plain = reshards.read_contents, reshards._problem, list[str]()

    def changed(path: Path) -> Contents:
        found = read(path)
        if path.name == "2":
            found.tensors = {name: t + 1 for name, t in found.tensors.items()}
        return found

    def twice(*move: Any) -> str:
        """What is said of a move as it was, and of one that goes wrong."""
        plain.append(judge(*move))
        with monkeypatch.context() as broken:
            broken.setattr(reshards, "read_contents", changed)
            return judge(*move)

    monkeypatch.setattr(reshards, "_problem", twice)
    fine, wrong = reshards.problems(walk)
    assert plain == ["", ""]
    assert fine == ""
    assert "is another after move 2" in wrong
