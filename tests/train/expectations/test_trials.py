"""What the ranks of a machine measure of their steps."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import merakc
from benchmarks.ranks import run_ranks
from merakc.ir.program import ActionKind
from merakc.machines.cluster import Sharing
from merakc.train.expectations import trials
from merakc.train.expectations.trials import (
    TRIALS,
    count_of,
    measure_around,
    measure_computes,
    shared_cores,
    values_of,
)
from merakc.train.model import ParallelModel
from merakc.train.steps import Steps
from tests.batch_models import CASES, made, reference
from tests.battery.small_models import Words, build, parallel, words

PLANS = [
    {"pp": 2, "schedule": "1f1b"}, {"tp": 2}, {"dp": 2, "state_shards": (2, 2, 2)},
]  # fmt: skip
Plan = Mapping[str, object]


@dataclass
class Tried:
    """What a rank has found of a plan."""

    seconds: list[dict[ActionKind, float]]
    around: float
    alike: bool  # it trains with trials as without
    of_one_batch: bool  # values are tried where the ranks have one batch
    of_own_batches: bool  # and where each has its own


def measured(steps: Steps) -> list[dict[ActionKind, float]]:
    found = measure_computes(steps, next(iter(steps.compiled.values())))
    return [dict(own) for each in found for own in each.values()]


def train(model: ParallelModel, tries: bool) -> list[torch.Tensor]:
    """The losses and the weights of two steps; with trials in between."""
    model.load_state_dict(build(Words).state_dict())
    model.zero_grad()
    optimizer = torch.optim.AdamW(model.parameters())
    found = []
    for k in range(2):
        loss = model(**words(k))["loss"]
        loss.backward()
        if tries:
            measured(model._own("_steps"))
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return found + [p.detach().as_subclass(torch.Tensor).clone() for p in model.parameters()]


def tried(plan: Plan) -> Tried:
    model = parallel(Words, words(0), **plan)
    steps = model._own("_steps")
    step = next(iter(steps.compiled.values()))
    samples = 4 if "dp" in plan else 8
    with_values = (
        values_of(steps, step, ((), words(seed, samples))) is not None
        for seed in (0, steps.groups.rank)
    )
    return Tried(
        measured(steps),
        measure_around(steps, step, ((), words(0))),
        all(torch.equal(*x) for x in zip(train(model, True), train(model, False), strict=True)),
        *with_values,
    )


@pytest.mark.parametrize("plan", PLANS)
def test_all_ranks_take_part_in_trials_that_change_nothing(plan: Plan) -> None:
    """In as many steps, and ranks of a replica try no values of their own."""
    first, second = run_ranks(2, tried, plan)
    assert 0 < len(first.seconds) == len(second.seconds) <= TRIALS
    for own in (*first.seconds, *second.seconds):
        assert own.keys() >= {ActionKind.FORWARD}
        assert all(0 < seconds < 60 for seconds in own.values())
    assert 0 < first.around == second.around < 60
    for found in (first, second):
        assert found.alike
        assert found.of_one_batch
        assert found.of_own_batches == ("dp" in plan)


def test_one_rank_measures_its_own() -> None:
    found = measured(parallel(Words, words(0))._own("_steps"))
    assert all(own.keys() == {ActionKind.FORWARD, ActionKind.BACKWARD} for own in found)


def half_failing(plan: Plan) -> tuple[int, list[bool]]:
    """On each of two ranks, of which the second does not run on zeros: the number of its trials,
    and which were alone.
    """
    steps = parallel(Words, words(0), **plan)._own("_steps")
    alone: list[bool] = []
    real = trials.trial

    def trial(own: Steps, *given: Any, **options: Any) -> Any:
        alone.append(options["alone"])
        return {} if own.groups.rank == 1 else real(own, *given, **options)

    trials.trial = trial  # type: ignore[assignment]
    try:
        return len(measure_computes(steps, next(iter(steps.compiled.values())))), alone
    finally:
        trials.trial = real


def test_the_others_are_measured_without_one_that_does_not_run_on_zeros() -> None:
    (count, alone), (none, other) = run_ranks(2, half_failing, {"pp": 2})
    assert count > 0 == none
    assert all(alone)
    assert other == [True]


def cores(*kinds: str) -> list[Sharing | None]:
    return [shared_cores(torch.device(kind)) for kind in kinds]


def test_ranks_of_a_cpu_share_its_cores() -> None:
    there = min(2, len(os.sched_getaffinity(0)))
    assert run_ranks(2, cores, "cpu", "cuda") == [[Sharing((1.0,) * there, 2), None]] * 2
    assert cores("cpu") == [None]


def checked() -> tuple[float, list[float]]:
    """The loss of a model that is only right where each part has places for its own values, and the
    seconds of trials.
    """
    name = "two images a text, by a mask"
    batch = CASES[name][1]
    model = merakc.auto_parallel(made(name), batch, dp=1, micro_batches=4)
    loss = model(**batch)
    steps = model._own("_steps")
    found = measure_computes(steps, next(iter(steps.compiled.values())))
    return loss.item(), [s for each in found for own in each.values() for s in own.values()]


def test_checks_of_values_let_those_of_no_meaning_pass() -> None:
    ((loss, seconds),) = run_ranks(1, checked)
    assert len(seconds) > 1
    assert loss == pytest.approx(reference("two images a text, by a mask")[0], rel=1e-10)


def test_trials_are_on_the_values_of_the_example() -> None:
    batch = words(0)
    steps = parallel(Words, batch)._own("_steps")
    (step,) = steps.compiled.values()
    brought = values_of(steps, step, ((), batch))
    assert brought is not None
    seen = [x for part in brought[0] for x in part.values() if x.dtype == torch.int64 and x.dim()]
    assert any(torch.equal(x, batch["ids"]) for x in seen)
    on_meta = {name: x.to("meta") for name, x in batch.items()}
    assert values_of(steps, step, ((), on_meta)) is None


def test_an_example_that_the_model_does_not_take_is_tried_on_zeros() -> None:
    batch = words(0)
    steps = parallel(Words, batch)._own("_steps")
    (step,) = steps.compiled.values()
    garbage = {**batch, "ids": torch.full_like(batch["ids"], 10**6)}
    brought = values_of(steps, step, ((), garbage))
    assert brought is not None
    assert not trials.trial(steps, step, brought, alone=True)
    assert measure_computes(steps, step, brought)
    assert parallel(Words, garbage, cluster=None).plan_file.measured is not None


def test_trials_take_a_second_where_five_of_them_do() -> None:
    assert [count_of(s) for s in (0.01, 0.1, 0.2, 0.5, 1.0, 2.5, 9.0)] == [15, 10, 5, 3, 3, 2, 1]
