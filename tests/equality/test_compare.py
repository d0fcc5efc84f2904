"""Measuring a difference: none between equals, and each kind of wrong is seen."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from benchmarks.layouts import first_inequality, worst_difference
from merakc.equality.compare import Reference, worst_differences


def _reference() -> Reference:
    return Reference(
        losses=(1.0,),
        gradients=({"w": torch.tensor([1.0, 1e-3]), "key.bias": torch.tensor([1e-17])},),
        weights={"w": torch.tensor([2.0, 1.0])},
        buffers={"count": torch.tensor(3)},
    )


def test_equal_runs_have_no_difference() -> None:
    assert first_inequality(_reference(), _reference()) == ""
    assert worst_difference(_reference(), [(1.0,)], _reference(), 1e-10).error == 0


def test_each_kind_of_difference_is_measured() -> None:
    good = _reference()
    (gradients,) = good.gradients

    def error(ours: Reference, losses: tuple[float, ...] = (1.0,)) -> float:
        return worst_difference(ours, [(1.0,), losses], good, 1e-10).error

    assert error(good, (1.5,)) == 0.5
    assert error(good, (math.nan,)) == math.inf
    off = {**gradients, "w": gradients["w"] + torch.tensor([0.0, 0.25])}
    assert error(dataclasses.replace(good, gradients=(off,))) == pytest.approx(0.25)
    assert error(dataclasses.replace(good, weights={"w": torch.tensor([2.0, 1.5])})) == 0.25
    assert error(dataclasses.replace(good, weights={})) == math.inf
    assert error(dataclasses.replace(good, buffers={"count": torch.tensor(6)})) == 1.0
    shaped = {**gradients, "w": torch.zeros(2, 1)}
    assert error(dataclasses.replace(good, gradients=(shaped,))) == math.inf


def test_a_gradient_that_is_zero_in_theory_may_be_other_rounding_but_must_stay_zero() -> None:
    good = _reference()

    def error(bias: float) -> float:
        gradients = {**good.gradients[0], "key.bias": torch.tensor([bias])}
        ours = dataclasses.replace(good, gradients=(gradients,))
        return worst_difference(ours, [(1.0,)], good, 1e-10).error

    assert error(-3e-17) < 1e-10
    assert error(1e-11) > 1e-10


def test_a_buffer_that_is_zero_in_theory_may_be_other_rounding_but_must_stay_zero() -> None:
    buffers = {"mean": torch.tensor([1e-17]), "var": torch.tensor([0.5]), "n": torch.tensor(3)}
    good = dataclasses.replace(_reference(), buffers=buffers)

    def error(**changed: torch.Tensor) -> float:
        ours = dataclasses.replace(good, buffers={**buffers, **changed})
        return worst_difference(ours, [(1.0,)], good, 1e-10).error

    assert error(mean=torch.tensor([-2e-17])) < 1e-10
    assert error(mean=torch.tensor([1e-11])) > 1e-10
    assert error(n=torch.tensor(4)) > 0.1


def test_inequality_names_the_first_tensor() -> None:
    good = _reference()
    other = dataclasses.replace(good, weights={"w": torch.tensor([2.0, 1.0 + 1e-6])})
    assert first_inequality(good, other) == "weight of w"


def test_each_kind_has_its_own_largest_difference() -> None:
    good = _reference()
    weights = {"w": torch.tensor([2.0, 1.5])}
    found = worst_differences(dataclasses.replace(good, weights=weights), [(1.5,)], good, 1e-10)
    assert {kind: d.error for kind, d in found.items()} == {
        "loss": 0.5, "gradient": 0.0, "weight": 0.25, "buffer": 0.0
    }  # fmt: skip
    assert found["weight"].name == "weight of w"
    assert "buffer" not in worst_differences(
        *(dataclasses.replace(good, buffers={}), [(1.0,)]),
        dataclasses.replace(good, buffers={}),
        1e-10,
    )
