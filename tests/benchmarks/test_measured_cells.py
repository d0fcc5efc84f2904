"""What the table of small cells says of figures that are known, and one cell that runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.measured_cells import (
    CELLS,
    PLANS,
    UNCOUPLED,
    Cell,
    Summary,
    choices,
    document,
    measure,
    prices,
    together,
)
from benchmarks.measured_models import MODELS
from merakc.machines.cluster_files import preset

CELL = Cell("m", "a", 2, 1.0, 2.0, (1.25, 1.0, 9.0), (100, 200), (104, 200), (0, 0))


def test_there_are_28_cells_of_all_models_and_plans() -> None:
    assert len(CELLS) == len(set(CELLS)) == 28
    assert Counter(model for model, _ in CELLS) == {m: 4 if m == "clip" else 6 for m in MODELS}
    assert {plan for _, plan in CELLS} == {*PLANS, *UNCOUPLED}


def test_errors_are_of_the_median_and_of_the_worst_rank() -> None:
    assert CELL.measured_s == 1.25
    assert CELL.error == pytest.approx(-0.2)
    assert CELL.modelled_error == pytest.approx(0.6)
    assert CELL.memory_error == pytest.approx(4 / 104)
    assert replace(CELL, on_the_way_bytes=(3, 0)).memory_error == pytest.approx(1 / 104)


def test_a_choice_loses_what_the_plan_predicted_best_takes_more() -> None:
    cells = [
        CELL,
        replace(CELL, plan="b", predicted_s=1.1, runs_s=(1.2,)),
        replace(CELL, plan="c", predicted_s=0.9, runs_s=(1.5,)),
        replace(CELL, plan="d", ranks=4, runs_s=(0.1,)),
    ]
    (found,) = choices(cells)
    assert (found.chosen, found.best) == ("c", "b")
    assert found.loss == pytest.approx(0.25)


def test_every_bound_is_kept() -> None:
    good = replace(CELL, predicted_s=1.25)
    assert Summary((good,), (), ()).passed
    for bad in (
        replace(good, predicted_s=1.25 * 1.11),
        replace(good, predicted_s=1.25 * 1.06),  # the median
        replace(good, measured_bytes=(90, 200)),
    ):
        assert not Summary((bad,), (), ()).passed
    other = replace(good, plan="b", predicted_s=1.2, runs_s=(1.35,))
    cells = (good, other, good)
    assert not Summary(cells, tuple(choices(cells)), ()).passed
    page = document(Summary(cells, tuple(choices(cells)), ()), ["--steps", "3"])
    assert "| m | a | 1250.0 ms | 1250.0 ms | 1000 to 9000 | +0.0% | +60% | 3.8% |" in page
    assert "python -m benchmarks.measured_cells --steps 3" in page


def test_the_price_of_coupling_is_over_the_same_plan_without() -> None:
    plain = replace(CELL, plan="dp 2, uncoupled", predicted_s=0.5)
    coupled = replace(CELL, plan="dp 2", predicted_s=0.55, runs_s=(1.5,))
    (price,) = prices((plain, coupled, CELL))
    assert (price.plan, price.predicted, price.measured) == (
        "dp 2",
        pytest.approx(0.1),
        pytest.approx(0.2),
    )
    assert choices((plain, coupled)) == []
    summary = Summary((plain, coupled), (), (price,))
    assert summary.rows[-1][1:] == (pytest.approx(0.1), 0.05)
    assert "| m | dp 2 | +10.0% | +20.0% |" in document(summary, [])


def test_cells_take_turns() -> None:
    assert together([("m", "tp 2"), ("c", "dp 2"), ("c", "dp 2, uncoupled")]) == [
        ("m", ("tp 2",)),
        ("c", ("dp 2", "dp 2, uncoupled")),
    ]
    plans = ("pp 2, zb-h1",)
    found = measure("gpt2", plans, 2, preset("cpu"))
    assert tuple(cell.plan for cell in found) == plans
    for cell in found:
        assert (cell.ranks, len(cell.runs_s)) == (2, 2)
        assert cell.predicted_s > 0
        assert cell.modelled_s > 0
        assert cell.memory_error < 0.3
