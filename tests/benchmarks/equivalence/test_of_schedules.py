from __future__ import annotations

import dataclasses

import pytest

from benchmarks.equivalence.of_schedules import ScheduleCell, cells_rows, measure
from merakc.equality.compare import Difference

GOOD = ScheduleCell("gpt2", 2, "zb-v", "full", error=Difference(1e-15, "loss"))


def test_schedules_train_as_one_process_does() -> None:
    schedules = ["1f1b", "zb-h1", "zb-v", "merak"]
    cells = list(measure(["gpt2"], [2], schedules, ["none", "stage"], 60.0))
    assert [(c.schedule, c.recompute) for c in cells] == [
        (s, r) for s in schedules for r in ("none", "stage") if (s, r) != ("merak", "none")
    ]
    for cell in cells:
        assert cell.passed, cell
        assert cell.error is not None
        assert not cell.refused


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
    assert cells_rows([GOOD, other]) == [
        ["schedule", "recompute", "gpt2\np = 2", "gpt2\np = 4"],
        ["zb-v", "full", "[green]1e-15[/]", "-"],
        ["1f1b", "full", "-", "[red]1e-15 not bit-equal[/]"],
    ]
