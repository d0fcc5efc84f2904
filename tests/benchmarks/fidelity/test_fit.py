"""Constants and corrections from rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.fidelity.data import Row
from benchmarks.fidelity.fit import (
    Constants,
    constants_of,
    correct,
    errors,
    fit,
    predict,
    with_constants,
)
from benchmarks.gpt import Shape
from merakc.ir.strategy import Strategy
from merakc.machines.cluster_files import preset
from merakc.planner.job import Framework

HARDWARE = preset("a100-80")
TRUTH = with_constants(HARDWARE, Constants(0.6, 0.5, 6e-5, 0.4))


def made(h: int, tp: int, dp: int, b: int, m: int) -> Row:
    shape = Shape(h, 16, 4, 512, 8192)
    row = Row("made", "x", shape, Strategy(dp, tp, 1, "dp", micro_batches=m), b, Framework(), 1.0)
    return replace(row, step_s=predict(row, TRUTH).step_s)


ROWS = [
    made(h, tp, dp, b, m)
    for h, tp, dp, b, m in (
        (256, 1, 2, 1, 4), (1024, 1, 2, 4, 2), (2048, 1, 4, 8, 2), (2048, 2, 2, 4, 2),
        (2048, 4, 2, 8, 1), (1024, 2, 4, 2, 4), (2048, 1, 8, 2, 1), (256, 4, 1, 1, 2),
    )
]  # fmt: skip


def test_constants_are_put_in_and_read_out() -> None:
    assert constants_of(TRUTH) == Constants(0.6, 0.5, 6e-5, 0.4)
    assert TRUTH.slowest.bytes_per_s == HARDWARE.slowest.bytes_per_s


def test_constants_that_made_the_rows_are_found() -> None:
    assert np.abs(errors(ROWS, HARDWARE)).mean() > 0.1
    found = fit(ROWS, HARDWARE)
    assert np.abs(errors(ROWS, found)).max() < 0.01
    assert constants_of(found).product_share == pytest.approx(0.6, rel=0.05)
    assert constants_of(found).launch_s == pytest.approx(6e-5, rel=0.05)


def test_corrections_of_a_slow_block_are_found() -> None:
    slow = [replace(r, step_s=r.step_s * (1.2 if r.strategy.tp == 2 else 1.0)) for r in ROWS]
    found = correct(slow, TRUTH)
    assert np.abs(errors(slow, TRUTH)).max() > 0.15
    assert np.abs(errors(slow, TRUTH, found)).max() < 0.05
    assert predict(slow[0], TRUTH, found).source == "formula"  # of what comes before its blocks
