from __future__ import annotations

import dataclasses

import pytest

from benchmarks.equivalence.of_overlap import FUSED, TRIED, OverlapCell, cells_rows, measure
from benchmarks.zoo_models import ZOO
from merakc.equality.compare import Difference

GOOD = OverlapCell(
    "gpt2", 2, 2, 2, sub_batches=(2, 2), started=9, collectives=10, error=Difference(1e-15, "w")
)


def test_overlapped_steps_equal_one_process() -> None:
    (whole,) = measure(["llama"], [(2, 1)], [1], [True], 120.0)
    (parts,) = measure(["t5"], [(2, 2)], [4], [False], 120.0)
    (fused,) = measure(["llama"], [(2, 1)], [FUSED], [True], 120.0)
    assert fused.fused > 0
    for cell in (whole, parts, fused):
        assert cell.passed, cell
        assert 0 < cell.started <= cell.collectives
    assert parts.sub_batches == (4, 4)


def test_a_failure_is_reported() -> None:
    (cell,) = measure(["llama"], [(2, 1)], [-2], [False], 120.0)
    assert not cell.passed
    assert "ConfigError" in cell.failed or "MismatchError" in cell.failed


@pytest.mark.parametrize(
    ("changes", "passes"),
    [
        ({}, True),
        ({"error": Difference(1e-9, "w")}, False),
        ({"error": None, "failed": "rank 1 failed"}, False),
        ({"sub_batches": (2, 1)}, False),
        ({"started": 0}, False),
        ({"parts": FUSED, "fused": 8, "sub_batches": (1, 1)}, True),
        ({"parts": FUSED, "fused": 0, "sub_batches": (1, 1)}, False),
        ({"parts": FUSED, "fused": 8, "error": Difference(1e-9, "w")}, False),
    ],
)
def test_what_passes(changes: dict[str, object], passes: bool) -> None:
    cell = dataclasses.replace(GOOD, **changes)  # type: ignore[arg-type]
    assert cell.passed is passes
    assert bool(cell.complaint) is not passes


def test_the_table_has_a_column_for_each_layout_and_number_of_parts() -> None:
    other = dataclasses.replace(GOOD, tp=4, sub_batches=(2, 1))
    failed = dataclasses.replace(GOOD, model="t5", error=None, failed="no")
    heads, gpt2, t5 = cells_rows([GOOD, other, failed])
    assert heads == ["model", "tp 2 pp 2\nk = 2", "tp 4 pp 2\nk = 2"]
    assert gpt2 == ["gpt2", "[green]1e-15[/]", "[red]1e-15 (2, 1)[/]"]
    assert t5 == ["t5", "[red]failed[/]", "-"]
    fused = dataclasses.replace(GOOD, parts=FUSED, fused=8, sub_batches=(1, 1))
    assert cells_rows([fused]) == [["model", "tp 2 pp 2\nfused"], ["gpt2", "[green]1e-15[/]"]]


def test_all_models_are_there() -> None:
    assert len(TRIED.split(",")) == 10
    assert set(TRIED.split(",")) <= ZOO.keys()
