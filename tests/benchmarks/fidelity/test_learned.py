"""Corrections from measured steps."""

from __future__ import annotations

import math

import pytest

from benchmarks.fidelity.learned import learn
from merakc.costs.measured import NONE, Corrections

# Steps of two pieces: so many seconds of blocks, and of a head.
STEPS = [(8.0, 1.0), (16.0, 1.0), (8.0, 1.0), (16.0, 1.0)]
BLOCKS = [("block",), ("block",), ("block", "wide"), ("block", "wide")]
HEAD = ("head",)


def predict(k: int, corrections: Corrections) -> float:
    blocks_s, head_s = STEPS[k]
    return blocks_s * corrections.factor(BLOCKS[k]) + head_s * corrections.factor(HEAD)


def learned(measured_s: list[float]) -> Corrections:
    return learn([(own, HEAD) for own in BLOCKS], measured_s, predict)


def test_a_right_model_is_left_alone() -> None:
    found = learned([predict(k, NONE) for k in range(4)])
    assert all(abs(value) < 1e-6 for value in found.logs.values())


def test_what_only_some_steps_have_is_told_by_them() -> None:
    truth = Corrections({"wide": math.log(1.3)})
    measured_s = [predict(k, truth) for k in range(4)]
    found = learned(measured_s)
    assert found.factor(("block", "wide")) == pytest.approx(1.3, rel=0.03)
    assert found.factor(("block",)) == pytest.approx(1.0, abs=0.03)
    for k, seconds in enumerate(measured_s):
        assert predict(k, found) == pytest.approx(seconds, rel=0.02)


def test_labels_that_nobody_measured_have_no_factor() -> None:
    found = learned([1.2 * predict(k, NONE) for k in range(4)])
    assert found.factor(("of another kind",)) == 1.0
    assert found.is_measured(("block", "of another kind"))
    assert not found.is_measured(("of another kind",))
    assert not NONE.is_measured(("block",))


def test_one_step_that_is_far_off_moves_the_others_little() -> None:
    measured_s = [predict(k, NONE) for k in range(4)]
    measured_s[3] *= 2.0
    found = learned(measured_s)
    assert predict(0, found) == pytest.approx(measured_s[0], rel=0.15)
    assert predict(2, found) < 1.5 * measured_s[2]
