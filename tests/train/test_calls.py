"""Calls of the model that differ between ranks, and ranks that do not come to them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import merakc
from benchmarks.faults.work import Small, batch, plan_of
from benchmarks.ranks import run_ranks
from merakc.errors import ConfigError, MismatchError, RecordError, StuckError
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


def with_an_attribute(model: ParallelModel) -> None:
    model.scale = 2.0
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
        (with_an_attribute, "and with scale changed"),
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


@pytest.mark.parametrize("layout", [TP2, DP2])
def test_a_batch_that_wants_a_gradient_later(layout: str) -> None:
    run_ranks(2, _wants_gradient, layout)


def _wants_gradient(layout: str) -> None:
    model, given = made(layout), batch()
    train(model)
    given["x"].requires_grad_()
    with pytest.raises(RecordError, match="tensor 'x' of the batch requires a gradient"):
        model(**given)
    with torch.no_grad():
        model(**given)
    train(model)


class Asks(Small):
    """Goes by what torch's own state is."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = super().forward(x, labels)
        times = 1.0 + 2 * torch.is_grad_enabled() + 4 * torch.are_deterministic_algorithms_enabled()
        double = torch.get_default_dtype() == torch.float64
        logits = found["logits"] * times
        return {"loss": found["loss"] * times + (8 if double else 0), "logits": logits}


def test_torchs_own_state_is_seen_to_change() -> None:
    run_ranks(1, _changes_state)


def _changes_state() -> None:
    given = batch()
    for mode in (True, False):
        torch.manual_seed(0)
        plain = Asks()
        model = merakc.auto_parallel(copy.deepcopy(plain), given, cluster=NOMINAL_CPU)
        _compare_in_states(model.train(mode), plain.train(mode), given)


def _compare_in_states(model: nn.Module, plain: nn.Module, given: dict[str, torch.Tensor]) -> None:
    def same(*names: str) -> None:
        found, wanted = model(**given), plain(**given)
        for name in ("loss", *names):
            torch.testing.assert_close(found[name].detach() * 1, wanted[name].detach())

    same("logits")
    with torch.no_grad():
        same("logits")
    same()
    torch.use_deterministic_algorithms(True)
    same()
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float64)
    same()
    torch.set_default_dtype(torch.float32)
    same()


class AsksOfWeights(Small):
    """Goes by whether a parameter is trained."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = super().forward(x, labels)
        found["loss"] = found["loss"] * (2 if self.up.weight.requires_grad else 1)
        return found


@pytest.mark.parametrize("layout", [TP2, DP2])
def test_a_forward_that_asks_whether_parameters_are_trained(layout: str) -> None:
    run_ranks(2, _freezes, layout)


def _freezes(layout: str) -> None:
    model, given = made(layout), batch()
    model.up.requires_grad_(False)
    train(model)  # of a forward that does not ask
    plan = {"dp": 1, "tp": 2, "pp": 1} if layout == TP2 else {"dp": 2, "tp": 1, "pp": 1}
    model = merakc.auto_parallel(AsksOfWeights(), given, cluster=NOMINAL_CPU, **plan)
    train(model)
    model.up.requires_grad_(False)
    for frozen in (model, model.eval()):
        with pytest.raises(ConfigError, match=r"'up\.weight' requires no .*asks at .*\.py:\d+"):
            frozen(**given)
    model.up.requires_grad_(True)
    train(model.train())


@pytest.mark.parametrize("layout", [TP2, DP2])
def test_shapes_that_are_evaluated_before_they_are_trained(layout: str) -> None:
    run_ranks(2, _evaluates_first, layout)


def _evaluates_first(layout: str) -> None:
    model, given = made(layout), batch(4)
    evaluated = model.eval()(**given)["loss"]  # gradients are on
    trained = model.train()(**given)["loss"]
    trained.backward()
    torch.testing.assert_close(trained.detach(), evaluated.detach())
    assert all(p.grad is not None for p in model.parameters() if p.numel())


class LossOfOne(Small):
    """Its loss is a tensor of one element."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = super().forward(x, labels)
        return found | {"loss": found["loss"][None]}


@pytest.mark.parametrize("layout", [TP2, DP2])
def test_a_loss_has_the_shape_that_the_forward_gives_it(layout: str) -> None:
    run_ranks(2, _of_one, layout)


def _of_one(layout: str) -> None:
    torch.manual_seed(0)
    given, plain = batch(4), LossOfOne()
    plan = {"dp": 1, "tp": 2, "pp": 1} if layout == TP2 else {"dp": 2, "tp": 1, "pp": 1}
    model = merakc.auto_parallel(deepcopy(plain), given, cluster=NOMINAL_CPU, **plan)
    for one in (model, plain):
        loss = one(**given)["loss"]
        assert loss.shape == (1,)
        loss.backward(torch.tensor([2.0]))
    for name, parameter in plain.named_parameters():
        found = dict(model.named_parameters())[name].grad
        assert found is not None
        torch.testing.assert_close(found.norm() * 1, parameter.grad.norm())  # type: ignore[union-attr]
    assert model.eval()(**given)["loss"].shape == (1,)
