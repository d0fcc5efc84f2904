"""The benchmark of what the search finds."""

from __future__ import annotations

import pytest

from benchmarks.fidelity.data import Row
from benchmarks.gpt import Shape
from benchmarks.search_quality import Found, against_all, against_published
from merakc.ir.strategy import Strategy
from merakc.planner.job import Framework


def test_a_small_job_against_all_layouts() -> None:
    found = against_all("gpt2", 2, 4, "h100", lambda _: None)
    assert found.passed
    assert found.layouts > 5
    assert found.found_s >= found.other_s * (1 - 1e-9)


def test_a_published_row() -> None:
    shape = Shape(512, 8, 8, 128, 1024)
    strategy = Strategy(2, 2, 2, "dp", micro_batches=4, chunks=2, recompute="full")
    row = Row("Narayanan", "small", shape, strategy, 2, Framework(), 1.0)
    found = against_published(row)
    assert found.passed
    assert found.against == "dp 2 tp 2 pp 2"


@pytest.mark.parametrize(("found_s", "passed"), [(1.0, True), (1.009, True), (1.02, False)])
def test_what_passes(found_s: float, passed: bool) -> None:
    assert Found("a", "b", found_s, 1.0, 3).passed is passed
