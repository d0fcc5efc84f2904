"""A run beside its plan."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from merakc.errors import LedgerError
from merakc.ir.ledger import Ledger, Spent
from merakc.ir.plan_file import PlanFile, Prediction
from merakc.report.run import Row, compare_run, figures, rows_table, timed_steps
from tests.ir.test_ledger import HEADER, STEP
from tests.report.test_text import tiny_file


@pytest.fixture
def plan() -> PlanFile:
    return tiny_file(Prediction(0.1, 0.2, (1000, 900), (0.0, 0.01)))


def ledger(plan: PlanFile, *step_s: float) -> Ledger:
    steps = tuple(
        replace(
            STEP,
            step=k,
            step_s=seconds,
            optimizer_s=0.004 if k else None,
            spent=(
                Spent(0, "F", 4, 4 * seconds, 8 * seconds, seconds),
                Spent(1, "recv", 4, 0.02, 0.02, 0.02),
                Spent(1, "gather", 1, 0.0, 0.0, 0.0),
            ),
            exposed_s=(0.0, 0.03),
            peak_bytes=(2000, 950) if k == 2 else (),
            counted=k == 2,
        )
        for k, seconds in enumerate(step_s)
    )
    return Ledger("run.jsonl", replace(HEADER, plan=plan.hash), steps)


def test_rows_are_medians_of_the_steps_that_count(plan: PlanFile) -> None:
    found = {
        row.what: row for row in compare_run(plan, ledger(plan, 9.0, 9.0, 9.0, 0.1, 0.4, 0.2), "p")
    }
    assert found["step"] == Row("step", "s", 0.1, 0.2)
    assert found["step"].ratio == pytest.approx(2.0)
    forward = found["stage 0: forward"]  # of one of four micro-batches
    assert (forward.predicted, forward.measured) == pytest.approx((0.01, 0.2))
    assert forward.waited == pytest.approx(0.05)
    assert found["stage 1: waits for messages"] == Row(
        "stage 1: waits for messages", "s", 0.01, 0.02
    )
    assert found["optimizer"] == Row("optimizer", "s", 0.002, 0.004)
    assert found["rank 1 of the pipeline: waits for dp"].measured == 0.03
    assert "rank 0 of the pipeline: waits for dp" not in found
    assert found["rank 0 of the pipeline: peak memory"] == Row(
        "rank 0 of the pipeline: peak memory", "bytes", 1000, 2000
    )
    assert not any("gather" in what for what in found)


def test_the_table_marks_what_is_far_off(plan: PlanFile) -> None:
    rows = [*compare_run(plan, ledger(plan, *[0.101] * 6), "p"), Row("new", "s", 0.0, 1.0)]
    page = io.StringIO()
    Console(file=page, width=100, color_system="standard", force_terminal=True).print(
        rows_table(rows, "tiny")
    )
    lines = page.getvalue().splitlines()
    step = next(line for line in lines if "step " in line)
    assert "100.00 ms" in step
    assert "101.00 ms" in step
    assert "\x1b[33m" not in step
    peak = next(line for line in lines if "2.00" in line)
    assert "\x1b[33m" in peak
    assert any("25%" in line for line in lines)
    assert figures(rows)[0]["ratio"] == pytest.approx(1.01)
    assert figures(rows)[-1]["ratio"] is None


def test_the_ledger_of_another_plan_is_refused(plan: PlanFile) -> None:
    other = tiny_file(micro_batches=8)
    with pytest.raises(LedgerError, match=r"is of plan .*, and a.json is plan .*"):
        compare_run(other, ledger(plan, *[0.1] * 6), "a.json")


def test_a_run_that_only_warmed_up_is_refused(plan: PlanFile) -> None:
    short = ledger(plan, 0.1, 0.1, 0.1)
    with pytest.raises(LedgerError, match=r"holds 3 steps.*run more"):
        compare_run(plan, short, "p")
    assert [step.step for step in timed_steps(short, 0)] == [0, 1]
    assert [step.step for step in timed_steps(ledger(plan, *[0.1] * 5))] == [3, 4]
