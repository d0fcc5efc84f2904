from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from benchmarks.layouts import Difference
from benchmarks.schedule_equivalence import Cell, cells_table, measure

GOOD = Cell("gpt2", 2, "zb-v", "full", Difference(1e-15, "loss"))


def test_schedules_train_as_one_process_does() -> None:
    page = io.StringIO()
    schedules = ["1f1b", "zb-h1", "zb-v", "merak"]
    cells = list(measure(["gpt2"], [2], schedules, ["none", "selective"], 60.0, Console(file=page)))
    assert [(c.schedule, c.recompute) for c in cells] == [
        (s, r) for s in schedules for r in ("none", "selective") if (s, r) != ("merak", "none")
    ]
    for cell in cells:
        assert cell.passed, cell
        assert cell.error is not None
        assert not cell.refused
    assert page.getvalue() == ""


@pytest.mark.parametrize(
    ("changes", "passes"),
    [
        ({}, True),
        ({"error": Difference(1e-9, "w")}, False),
        ({"unequal": "gradient of w"}, False),
        ({"failed": "rank 1 failed"}, False),
        ({"error": None}, False),
        ({"error": None, "refused": "7 blocks do not give 8 stages"}, True),
    ],
)
def test_what_passes(changes: dict[str, object], passes: bool) -> None:
    cell = dataclasses.replace(GOOD, **changes)  # type: ignore[arg-type]
    assert cell.passed is passes


def test_the_table_has_a_column_for_each_model_and_number_of_ranks() -> None:
    other = dataclasses.replace(GOOD, pp=4, schedule="1f1b", unequal="loss")
    page = io.StringIO()
    Console(file=page, width=100).print(cells_table([GOOD, other]))
    text = page.getvalue()
    assert "p = 2" in text
    assert "not bit-equal" in text
    assert len(cells_table([GOOD, other]).columns) == 4
