"""Calls of the model that differ between ranks, and ranks that do not come to them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import merakc
from benchmarks.faults.work import Small, batch, plan_of
from benchmarks.ranks import run_ranks
from merakc.errors import MismatchError, StuckError
from merakc.machines.cluster import NOMINAL_CPU
from merakc.runtime.health.facts import ALL
from merakc.runtime.health.job import job
from merakc.train.calls import model_call
from merakc.train.model import ParallelModel

TIMEOUT_S = 3.0
TP2, DP2 = "tp2", "dp2 zero-1"
PLANS: dict[str, Path] = {}
Call = Callable[[ParallelModel], object]


@pytest.fixture(scope="module", autouse=True)
def plans(tmp_path_factory: pytest.TempPathFactory) -> None:
    """So that no rank looks for a plan."""
    for layout in (TP2, DP2):
        PLANS[layout] = tmp_path_factory.mktemp("plans") / "plan.json"
        PLANS[layout].write_text(plan_of(layout))


def made(layout: str) -> ParallelModel:
    return merakc.auto_parallel(
        Small(), batch(), plan=PLANS[layout], timeout_s=TIMEOUT_S, cluster=NOMINAL_CPU
    )


def train(model: ParallelModel) -> None:
    model(**batch())["loss"].backward()


def evaluate(model: ParallelModel) -> None:
    model.eval()(**batch())


def without_gradients(model: ParallelModel) -> None:
    with torch.no_grad():
        model(**batch())


def frozen_head(model: ParallelModel) -> None:
    model.head.eval()
    train(model)


def save(model: ParallelModel) -> None:
    merakc.save(f"/proc/nowhere/{dist.get_rank()}", model)


def told(layout: str, odd: Call) -> list[str]:
    """What all ranks raise where rank 1 makes another call."""

    def run() -> str:
        model = made(layout)
        train(model)
        with pytest.raises(MismatchError) as caught:
            (odd if model.rank == 1 else train)(model)
        with pytest.raises(MismatchError):  # and it stays so
            train(model)
        return str(caught.value)

    return run_ranks(2, run)


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (lambda m: m(**batch(6)), "x float32[6, 16], labels int64[6]"),
        (lambda m: m(batch()["x"]), "0 float32[8, 16]"),
        (evaluate, "model(...) in eval mode"),
        (without_gradients, "model(...) in training mode without gradients"),
        (frozen_head, "but for modules"),
        (lambda m: m.predict(**batch()), "model.predict(...)"),
    ],
)
def test_another_shape_mode_or_call_on_one_of_two_tp_ranks(odd: Call, words: str) -> None:
    for text in told(TP2, odd):
        assert "rank 1 is in" in text
        assert words in text


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (evaluate, "model(...) in eval mode"),
        (lambda m: m.full_state_dict(), "model.full_state_dict"),
        (save, "merakc.save"),
    ],
)
def test_another_mode_or_call_on_one_of_two_dp_ranks(odd: Call, words: str) -> None:
    for text in told(DP2, odd):
        assert f"rank 1 is in {words}" in text


def test_dp_ranks_may_have_batches_of_different_sizes() -> None:
    def run() -> int:
        model = made(DP2)
        for samples in (8, 6, 8, 4):
            model(**batch(samples + 2 * model.rank))["loss"].backward()
        found = job()
        assert found is not None
        return found.here.call

    assert run_ranks(2, run) == [5, 5]


def test_the_ranks_of_a_replica_have_their_batch_in_common() -> None:
    def run() -> dict[str, str]:
        degrees = {"dp": 2, "tp": 2, "pp": 1}
        model = merakc.auto_parallel(Small(), batch(), cluster=NOMINAL_CPU, **degrees)
        given = batch(8 - 2 * model.data_parallel_rank)
        found = job()
        assert found is not None
        with model_call(model._own("_steps"), "model(...)", (), given, training=True):
            return dict(found.here.facts)

    first, second, third, fourth = run_ranks(4, run)
    assert first == second != third == fourth
    assert first.keys() == {ALL, "0,1"}
    assert third.keys() == {ALL, "2,3"}
    assert first[ALL] == third[ALL] == "model(...) in training mode"
    assert first["0,1"].endswith("x float32[8, 16], labels int64[8]")


def test_a_call_that_one_rank_leaves_out_is_told() -> None:
    def run() -> str:
        model = made(TP2)
        train(model)
        if model.rank == 1:
            found = job()
            assert found is not None
            found.wait_for_fault(2 * TIMEOUT_S)
            return str(found.fault)
        with pytest.raises(StuckError) as caught:
            model.full_state_dict()
        return str(caught.value)

    first, second = run_ranks(2, run)
    assert first.startswith("rank 1 did not come to call 4, model.full_state_dict, where rank 0")
    assert "rank 1 is outside any call, after call 3, model(...)" in first
    assert "rank 1 did not come" in second


def test_a_save_beside_training_ends_when_a_rank_leaves(tmp_path: Path) -> None:
    def run() -> str:
        model = made(DP2)
        train(model)
        merakc.save(tmp_path / "first", model, wait=False).wait(60)
        found = job()
        assert found is not None
        if model.rank == 1:
            found.close()
            return ""
        with pytest.raises(StuckError) as caught:
            merakc.save(tmp_path / "second", model, wait=False).wait(60)
        return str(caught.value)

    assert run_ranks(2, run)[0].startswith("rank 1 has ended")
