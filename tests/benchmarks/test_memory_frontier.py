"""Rows of the frontier: small models of every kind."""

from __future__ import annotations

import pytest

from benchmarks import memory_frontier
from benchmarks.memory_frontier import measure


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"SAMPLES": 4, "TOKENS": 64, "WORDS": 64, "LAYERS": 4, "HIDDEN": 64, "SIDE": 32}
    for name, size in (sizes | {"STEPS": 1}).items():
        monkeypatch.setattr(memory_frontier, name, size)


@pytest.mark.parametrize("name", ["t5", "vit", "unet"])
def test_a_row_of_one_rank(name: str) -> None:
    none, full = (measure(name, kind)["predicted_bytes"] for kind in ("none", "full"))
    assert 0 < full < none


def test_a_row_of_two_ranks() -> None:
    row = measure("gpt2", "full", "pp2")
    assert (row["model"], row["kind"], row["predicted_bytes"]) == ("gpt2 pp2", "full", 0)
    assert row["cpu_s"] > 0
