"""The cells: what they cover, what passes, and one of each kind measured."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.equivalence.cells import BOUND
from benchmarks.equivalence.state_cells import (
    DP,
    MESHES,
    Equality,
    StateCell,
    all_cells,
    all_equalities,
    measure_cell,
    measure_equality,
)
from benchmarks.resident_state import Held
from merakc.equality.compare import Difference
from merakc.ir.state import StateShards, lattice

RIGHT = Held({0: 1000}, 8000, 2000, 4000)  # of 1, 4, 4 in float64


def test_every_point_is_covered_with_tp_and_with_pp() -> None:
    points = set(lattice(DP))
    assert len(points) == 9
    for model in ("gpt2", "t5", "uneven"):
        for mesh in MESHES:
            own = {c.shards[0] for c in all_cells(False) if (c.model, c.mesh) == (model, mesh)}
            assert own == points
    kinds = {(bool(c.clip_norm), c.precision, len(set(c.shards))) for c in all_cells(False)}
    assert kinds == {(False, None, 1), (False, None, 2), (True, None, 1), (False, "bf16-mixed", 1)}
    quick = {(bool(c.clip_norm), c.precision, len(set(c.shards))) for c in all_cells(True)}
    assert quick == kinds
    assert {e.shards for e in all_equalities(False)} == set(lattice(2))


@pytest.mark.parametrize(
    ("changes", "passes"),
    [
        ({}, True),
        ({"error": Difference(2 * BOUND, "weight")}, False),
        ({"error": Difference(float("nan"), "weight")}, False),
        ({"failed": "rank 0 failed"}, False),
        ({"held": (dataclasses.replace(RIGHT, gradients_bytes=2050),)}, False),
        ({"held": (dataclasses.replace(RIGHT, parameters_bytes=8100),)}, True),
        ({"held": (RIGHT, dataclasses.replace(RIGHT, optimizer_bytes=3900))}, False),
    ],
)
def test_what_passes(changes: dict[str, object], passes: bool) -> None:
    cell = StateCell("gpt2", "tp = 2", (StateShards(1, 4, 4),), error=Difference(1e-15, "loss"))
    cell = dataclasses.replace(cell, held=(RIGHT,))
    assert dataclasses.replace(cell, **changes).passed is passes  # type: ignore[arg-type]


def test_bytes_are_those_of_the_ranks_own_stage() -> None:
    first, second = (
        Held({0: 1000}, 8000, 8000, 16000),
        dataclasses.replace(RIGHT, elements={1: 1000}),
    )
    stages = StateShards(), StateShards(1, 4, 4)
    cell = StateCell("gpt2", "pp = 2", stages, held=(first, second))
    assert [cell.byte_error(k) for k in ("parameters", "gradients", "optimizer")] == [0, 0, 0]
    assert cell.padding == 0
    padded = dataclasses.replace(second, parameters_bytes=8024)
    assert dataclasses.replace(cell, held=(first, padded)).padding == 3
    tied = Held({0: 400, 1: 600}, 8000, 8 * (400 + 150), 16 * (400 + 150))
    cell = dataclasses.replace(cell, held=(first, tied))
    assert [cell.byte_error(k) for k in ("parameters", "gradients", "optimizer")] == [0, 0, 0]


def test_a_cell_of_the_uneven_model() -> None:
    stages = StateShards(1, 1, 4), StateShards(2, 2, 2)
    cell = measure_cell(StateCell("uneven", "pp = 2", stages), 120.0)
    assert cell.passed, cell
    assert cell.error is not None
    assert not cell.held


def test_a_comparison_with_ddp() -> None:
    found = measure_equality(Equality("uneven", StateShards(2, 2, 2), 1), 60.0)
    assert found.passed, found
