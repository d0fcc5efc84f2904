"""Factors of pieces by their labels."""

from __future__ import annotations

import math

import pytest

from merakc.costs.measured import NONE, Corrections


def test_factors_of_labels_multiply() -> None:
    corrections = Corrections({"block": math.log(1.5), "wide": math.log(2.0)})
    assert corrections.factor(("block", "wide", "of another kind")) == pytest.approx(3.0)
    assert corrections.is_measured(("wide", "of another kind"))
    assert not corrections.is_measured(("of another kind",))
    assert (NONE.factor(("block",)), NONE.is_measured(("block",))) == (1.0, False)
