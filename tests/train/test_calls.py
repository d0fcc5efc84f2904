"""Calls of the model that differ between ranks, and ranks that do not come to them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
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
from merakc.train import calls
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
    ("layout", "odd", "words"),
    [
        (TP2, lambda m: m(**batch(6)), "x float32[6, 16], labels int64[6]"),
        (TP2, lambda m: m.predict(**batch()), "model.predict(...)"),
        (DP2, evaluate, "model(...) in eval mode"),
        (DP2, save, "merakc.save"),
    ],
)
def test_another_call_on_one_of_two_ranks(layout: str, odd: Call, words: str) -> None:
    for text in told(layout, odd):
        assert "rank 1 is in" in text
        assert words in text


# What ranks are told of a call.
WORDS: list[tuple[Call, str]] = [
    (train, "model(...) in training mode, with x float32[8, 16], labels int64[8]"),
    (lambda m: m(**batch(6)), "x float32[6, 16], labels int64[6]"),
    (lambda m: m(batch()["x"]), "0 float32[8, 16]"),
    (without_gradients, "model(...) in training mode without gradients"),
    (lambda m: m.predict(**batch()), "model.predict(...)"),
    (frozen_head, "but for modules"),
    (evaluate, "model(...) in eval mode"),
    (with_an_attribute, "and with scale changed"),
]


def compared() -> list[str]:
    """What two ranks compare of each of these calls, which both make."""
    model, seen = made(TP2), list[str]()
    real = calls.call

    def noted(name: str, facts: dict[str, str], **options: bool) -> AbstractContextManager[None]:
        seen.append(facts[ALL])
        return real(name, facts, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(calls, "call", noted)
        for act, _ in WORDS:
            act(model.train())  # type: ignore[arg-type]
    return seen


def test_the_mode_and_shapes_of_a_call_are_what_ranks_compare() -> None:
    first, second = run_ranks(2, compared)
    assert first == second
    assert len(set(first)) == len(WORDS)
    for text, (_, words) in zip(first, WORDS, strict=True):
        assert words in text


def _of_different_sizes(model: ParallelModel) -> None:
    for samples in (8, 6, 8, 4):
        model(**batch(samples + 2 * model.rank))["loss"].backward()
    found = job()
    assert found is not None
    assert found.here.call == 5


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


def _wants_gradient(model: ParallelModel) -> None:
    given = batch()
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
    """Goes by whether a parameter is trained; its loss is a tensor of one element."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = super().forward(x, labels)
        found["loss"] = found["loss"][None] * (2 if self.up.weight.requires_grad else 1)
        return found


def _freezes(model: ParallelModel) -> None:
    given = batch(4)
    for frozen in (model, model.eval()):
        model.up.requires_grad_(False)
        with pytest.raises(ConfigError, match=r"'up\.weight' requires no .*asks at .*\.py:\d+"):
            frozen(**given)
    model.up.requires_grad_(True)
    model.train()(**given)["loss"].backward(torch.ones(1))


def _evaluates_first(model: ParallelModel) -> None:
    given = batch(4)
    evaluated = model.eval()(**given)["loss"]  # gradients are on
    trained = model.train()(**given)["loss"]
    trained.backward()
    torch.testing.assert_close(trained.detach(), evaluated.detach())
    assert all(p.grad is not None for p in model.parameters() if p.numel())


def _of_one(model: ParallelModel, plain: nn.Module) -> None:
    given = batch(4)
    for one in (model, plain):
        loss = one(**given)["loss"]
        assert loss.shape == (1,)
        loss.backward(torch.tensor([2.0]))
    for name, parameter in plain.named_parameters():
        found = dict(model.named_parameters())[name].grad
        assert found is not None
        torch.testing.assert_close(found.norm() * 1, parameter.grad.norm())  # type: ignore[union-attr]
    assert model.eval()(**given)["loss"].shape == (1,)
    model.train()
    model.zero_grad()


def on_two(layout: str) -> None:
    """What all ranks call alike, or may call with sizes of their own."""
    model = made(layout)
    if layout == DP2:
        _of_different_sizes(model)
        model.zero_grad()
    _evaluates_first(model)
    model.zero_grad()
    _wants_gradient(model)
    model.up.requires_grad_(False)
    train(model)  # of a forward that does not ask
    torch.manual_seed(0)
    plan = {"dp": 1, "tp": 2, "pp": 1} if layout == TP2 else {"dp": 2, "tp": 1, "pp": 1}
    plain = AsksOfWeights()
    model = merakc.auto_parallel(deepcopy(plain), batch(4), cluster=NOMINAL_CPU, **plan)
    _of_one(model, plain)
    _freezes(model)


@pytest.mark.parametrize("layout", [TP2, DP2])
def test_calls_that_change_from_one_to_the_next(layout: str) -> None:
    """Of the sizes of batches, of whether a batch or a parameter requires a gradient, of modes; and
    the shape of the loss is the forward's.
    """
    run_ranks(2, on_two, layout)


def unfrozen(layer: int) -> tuple[str, int]:
    """What a rank is told of layers made trainable between steps, and steps that it has taken."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
    net[layer].requires_grad_(False)
    x = torch.ones(4, 6, dtype=torch.float64)
    loss = lambda out, _: out.square().mean()  # noqa: E731
    model = merakc.auto_parallel(net, x, loss=loss, dp=1, pp=2, micro_batches=2, timeout_s=30)
    model(x).loss.backward()
    for parameter in model[layer].parameters():
        parameter.requires_grad_(True)
    with pytest.raises(ConfigError) as told:
        model(x)
    for parameter in model[layer].parameters():
        parameter.requires_grad_(False)
    model(x).loss.backward()
    return str(told.value), model._own("_steps").taken


@pytest.mark.parametrize("layer", [0, 2])
def test_all_ranks_refuse_layers_that_are_made_trainable(layer: int) -> None:
    """Before a step is taken; the ranks that hold nothing of them too."""
    for told, taken in run_ranks(2, unfrozen, layer):
        assert f"parameter '{layer}.weight' requires a gradient now" in told
        assert taken == 2
