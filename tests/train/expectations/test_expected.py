"""What compiled graphs are expected to cost, measured and modelled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.ranks import run_ranks
from merakc.costs.spent import by_rank, merged
from merakc.ir.program import ActionKind
from merakc.kernels import gemm
from merakc.machines.cluster import NOMINAL_CPU, Sharing
from merakc.train.expectations import expected as module
from merakc.train.expectations.expected import _of_slowest, expected
from tests.battery.small_models import Words, parallel, warm_up, words


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    warm_up()


def test_measured_seconds_replace_those_of_the_cluster() -> None:
    steps = parallel(Words, words(0))._own("_steps")
    step = next(iter(steps.compiled.values()))
    modelled, _, none = expected(steps, step, NOMINAL_CPU, None)
    again, *_ = expected(steps, step, NOMINAL_CPU, None)
    measured, simulation, here = expected(steps, step, NOMINAL_CPU, ((), words(0)))
    assert none is None
    assert here is not None
    assert here.seconds[0].keys() == {"F", "B"}
    assert modelled == again
    assert here.around_s > 0
    assert measured.step_s == simulation.step_s + here.around_s != modelled.step_s
    assert measured.peak_bytes == modelled.peak_bytes


def test_what_other_products_took_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    places = set()
    for gain in (1.0, 2.0):
        monkeypatch.setattr(gemm, "gain", lambda gain=gain: gain)
        measured = parallel(Words, words(0), cluster=None).plan_file.measured
        assert measured is not None
        places.add(measured.where)
    assert len(places) == 2


def refused(*_: object) -> Any:
    raise AssertionError("computes were measured")


def test_a_plan_brings_along_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    first = parallel(Words, words(0), cluster=None)
    first.plan_file.save(path)
    with monkeypatch.context() as patched:
        patched.setattr("merakc.train.expectations.expected.measure_computes", refused)
        again = parallel(Words, words(0), cluster=None, plan=path)
    assert again.plan_file == first.plan_file
    assert again.simulation.step_s == first.simulation.step_s
    losses = [model(**words(0))["loss"] for model in (first, again)]
    assert torch.equal(*losses)


@pytest.mark.parametrize("what", ["another plan", "another machine", "more threads", "no figures"])
def test_figures_of_something_else_are_measured_again(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = parallel(Words, words(0), cluster=None).plan_file
    assert file.measured is not None
    if what == "another plan":
        file = replace(file, decisions=replace(file.decisions, conventions=("another",)))
    elif what == "another machine":
        monkeypatch.setattr("merakc.train.expectations.expected._processor", lambda: "an abacus")
    elif what == "more threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    else:
        file = replace(file, measured=None)
    monkeypatch.setattr("merakc.train.expectations.expected.measure_computes", refused)
    with pytest.raises(AssertionError, match="computes were measured"):
        parallel(Words, words(0), cluster=None, plan=file)


def measure_twice(path: Path) -> tuple[bool, bool]:
    """On each of some ranks: whether a plan is measured, and again with its file."""
    calls = []
    real = module.measure_computes

    def counted(*args: Any) -> Any:
        calls.append(0)
        return real(*args)

    module.measure_computes = counted
    try:
        model = parallel(Words, words(0), cluster=None, pp=2)
        if model.rank == 0:
            model.plan_file.save(path)
        dist.barrier()
        first = len(calls)
        again = parallel(
            Words, words(0), cluster=None, plan=path if model.rank == 0 else model.plan_file
        )
        assert again.plan_file == model.plan_file
    finally:
        module.measure_computes = real
    return first == 1, len(calls) == 2


def on_one_core() -> list[tuple[float, float]]:
    """By stage and kind: what simulated computes of ranks that take turns take, and measured."""
    module.shared_cores = lambda _: Sharing((1.0,), 2)
    module.measure_computes = lambda _, step, __: [
        {s: {ActionKind.FORWARD: 0.01, ActionKind.BACKWARD: 0.03} for s in step.executor.stages}
    ]
    steps = parallel(Words, words(0), pp=2, micro_batches=4, schedule="1f1b")._own("_steps")
    step = next(iter(steps.compiled.values()))
    _, simulation, here = expected(steps, step, NOMINAL_CPU, ((), words(0)))
    assert here is not None
    assert simulation.stretch > 1.1
    return [
        (own.seconds / own.count, here.seconds[own.stage][own.kind])
        for own in merged(by_rank(simulation.events))
        if own.kind in here.seconds[own.stage]
    ]


def both(path: Path) -> tuple[tuple[bool, bool], list[tuple[float, float]]]:
    return measure_twice(path), on_one_core()


def test_all_ranks_take_what_was_measured_and_computes_that_take_turns_are_simulated_as_they_were(
    tmp_path: Path,
) -> None:
    for measured, found in run_ranks(2, both, tmp_path / "plan.json"):
        assert measured == (True, False)
        assert len(found) == 4
        assert all(simulated == pytest.approx(seen, rel=0.1) for simulated, seen in found)


def test_the_slowest_rank_of_each_trial_counts() -> None:
    first, second = ActionKind.FORWARD, ActionKind.BACKWARD
    ranks = [
        [{first: 1.0, second: 2.0}, {first: 5.0, second: 5.0}, {first: 1.0, second: 4.0}],
        [{first: 2.0, second: 2.0}, {first: 1.0, second: 1.0}, {first: 1.0, second: 1.0}],
    ]
    assert _of_slowest(ranks) == {"F": 2.0, "B": 4.0}
    assert _of_slowest([ranks[0], []]) == {}
