"""Measuring a layout: a right one is near zero, and each kind of wrong is seen."""

from __future__ import annotations

import pytest

import merakc
from benchmarks.layouts import Task, train_twice, worst_difference
from benchmarks.models import MODELS
from benchmarks.ranks import run_ranks
from benchmarks.reference import train_reference
from merakc.ir.program import Mesh
from tests.benchmarks.stand_in import stand_in


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
