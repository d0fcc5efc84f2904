"""Small mT5s in ZeRO's stages: what is measured of the smallest, and what is made of it."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from benchmarks.ranks import run_ranks
from benchmarks.resident_state import Held
from benchmarks.zero_study.measured import (
    STAGES,
    Machine,
    Row,
    measure_fabric,
    measure_overlap,
    measure_stages,
    measured_table,
    misses,
    ratios,
)
from benchmarks.zero_study.models import Size
from merakc.costs.fabric import Fabric

MACHINE = Machine(Fabric(2, 1e9, 1e9, 1e-4, 1e-4), 0.5, 1.0, 2.0, 1e9)
TINY = Size("tiny", 64, 64, 1, 1)


def rows(third_s: float) -> list[Row]:
    """Stage 3 takes `third_s` of the others' time."""
    held = Held({0: 1000}, 4000, 4000, 8000)
    return [
        Row("2M", stage, 2, (1.0, 1.1, 1.0), 0.9, held, 16000, 20000, MACHINE)
        for stage in STAGES[:3]
    ] + [Row("2M", STAGES[3], 2, (third_s, 1.1 * third_s, 9.0), 0.9, held, 16000, 20000, MACHINE)]


def test_ratios_are_of_the_same_round() -> None:
    assert ratios(rows(2.0), "zero-3") == pytest.approx([2.0, 2.0, 9.0])
    assert ratios(rows(2.0), "zero-2") == [1.0, 1.0, 1.0]


def test_misses() -> None:
    assert misses(rows(2.0)) == []
    assert misses(rows(0.5)) == ["mT5 2M on 2 ranks: stage 3 takes 0.50 of stage 2's time"]
    heavy = [replace(rows(2.0)[0], predicted_bytes=15000), *rows(2.0)[1:]]
    (text,) = misses(heavy)
    assert "zero-0 holds 16000 bytes of state, the formula says 15000" in text


def test_the_table_has_a_row_for_each_stage() -> None:
    page = io.StringIO()
    Console(file=page, width=140).print(measured_table([rows(2.0)]))
    assert "2.00 (2.00 to 9.00)" in page.getvalue()
    assert page.getvalue().count("2M") == 4


def _links() -> tuple[Fabric, float]:
    return measure_fabric(), measure_overlap()


def test_links_are_measured_alike_on_all_ranks() -> None:
    (fabric, overlap), other = run_ranks(2, _links)
    assert other == (fabric, overlap)
    assert fabric.ranks_per_node == 2
    assert 0 < fabric.local_latency_s < 1
    assert 1e6 < fabric.local_bytes_per_s < 1e12
    assert 0 <= overlap <= 1


def test_stages_of_a_tiny_model() -> None:
    stages = STAGES[0], STAGES[3]
    found = run_ranks(2, measure_stages, TINY, 2, stages, timeout_s=280.0)[0]
    assert tuple(row.stage for row in found) == stages
    for row in found:
        assert len(row.steps_s) == 2
        assert row.held_bytes == pytest.approx(row.predicted_bytes, rel=0.01)
        assert row.predicted_s > MACHINE.fabric.local_latency_s
        assert row.peak_bytes > row.held_bytes - row.held.gradients_bytes
    assert [row.held.gathered_bytes > 0 for row in found] == [False, True]
