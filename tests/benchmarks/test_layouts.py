"""Measuring a layout: a right one is near zero, and each kind of wrong is seen."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import merakc
from benchmarks.layouts import Task, first_inequality, train_twice, worst_difference
from benchmarks.models import MODELS
from benchmarks.ranks import run_ranks
from benchmarks.reference import Reference, train_reference
from merakc.ir.program import Mesh
from tests.benchmarks.stand_in import stand_in


def _reference() -> Reference:
    return Reference(
        losses=(1.0,),
        gradients=({"w": torch.tensor([1.0, 1e-3]), "key.bias": torch.tensor([1e-17])},),
        weights={"w": torch.tensor([2.0, 1.0])},
        buffers={"count": torch.tensor(3)},
    )


@pytest.mark.parametrize("name", ["bert", "resnet"])
def test_a_right_data_parallel_run_agrees_and_repeats(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = MODELS[name]
    monkeypatch.setattr(merakc, "auto_parallel", stand_in(case.valid_labels), raising=False)
    task = Task(case, Mesh(dp=2), 8, 4, 2, lift_casts=False)
    results = run_ranks(2, train_twice, task)
    assert [text for _, text in results] == ["", ""]
    dp = 2 if case.running_statistics else 1
    reference = train_reference(case, batch_size=8, micro_batches=4, steps=2, dp=dp)
    losses = [result.losses for result, _ in results]
    assert worst_difference(results[0][0], losses, reference, 1e-10).error < 1e-13


def test_wrong_gradients_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    case = MODELS["bert"]
    wrong = stand_in(case.valid_labels, scale=1 + 1e-8)
    monkeypatch.setattr(merakc, "auto_parallel", wrong, raising=False)
    ((result, _),) = run_ranks(1, train_twice, Task(case, Mesh(), 8, 4, 1, lift_casts=False))
    reference = train_reference(case, batch_size=8, micro_batches=4, steps=1)
    found = worst_difference(result, [result.losses], reference, 1e-10)
    assert found.error == pytest.approx(1e-8, rel=1e-3)
    assert found.name.startswith("gradient of step 0")


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
