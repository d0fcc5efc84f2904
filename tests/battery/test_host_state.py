"""What is updated on the host trains to the same bits as what is updated on the device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import merakc
from benchmarks.ranks import run_ranks
from merakc.runtime.host import _pool, is_beside
from merakc.runtime.part import plain
from merakc.train.model import ParallelModel
from tests.battery.small_models import Tensors, Words, parallel, part, warm_up, words

LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {"micro_batches": 2},
    "zero-1": {"dp": 2, "state_shards": "zero-1"},
    "zero-3": {"dp": 2, "state_shards": "zero-3", "micro_batches": 2},
    "tp": {"dp": 1, "tp": 2},
    "pp": {"dp": 1, "pp": 2, "micro_batches": 2},  # with a tied embedding
    "dp, pp": {"dp": 2, "pp": 2, "micro_batches": 2, "state_shards": "zero-0"},
    "bf16": {"dp": 2, "state_shards": "zero-1", "precision": "bf16-mixed"},
    "fp16": {"dp": 1, "precision": "fp16-mixed"},
    "tp, bf16": {"dp": 1, "tp": 2, "precision": "bf16-mixed", "micro_batches": 2},
}
WHOLE = ("optimizer", "parameters")
Optimizer = Callable[..., torch.optim.Optimizer]


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    warm_up()


def _optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    named = [*model.named_parameters()]
    decay = [p for n, p in named if p.dim() > 1]
    rest = [p for n, p in named if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    if kind == "muon":
        return torch.optim.Muon(decay, lr=1e-2)
    made: dict[str, Optimizer] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    options = {"fused": True} if kind == "adamw" else {"momentum": 0.9, "lr": 1e-2}
    return made[kind](groups, **options)  # type: ignore[arg-type]


def _step(model: ParallelModel, optimizer: torch.optim.Optimizer, number: int) -> float:
    """Clips in every other step, and adds up two batches in the third."""
    calls = (number, number + 10) if number == 2 else (number,)
    for seed in calls:
        loss = model(**part(words(seed), model))["loss"]
        loss.backward()
    if number % 2:
        model.clip_grad_norm_(0.5)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def trained(
    layout: dict[str, Any], kind: str, folder: Path | None = None
) -> tuple[list[float], Tensors]:
    """The losses and the weights of some steps; the last behind a save and a load, if any."""
    model = parallel(lambda: Words(blocks=2), words(0), **layout)
    optimizer = _optimizer(kind, model)
    losses = [_step(model, optimizer, n) for n in range(3)]
    asked, beside = layout.get("offload", "none"), model.plan.host_states
    held = [n for n, p in model._own("_steps").state.items() if is_beside(plain(p))]
    assert sorted(held) == sorted(set(beside) & model._own("_steps").state.keys())
    every = {n for n, p in model.named_parameters() if p.requires_grad}
    assert (beside == ()) if asked == "none" else (set(beside) == every) == (asked in WHOLE)
    assert set(model.plan.host_parameters) == (every if asked == "parameters" else set())
    assert bool(_pool) == bool(beside)
    if folder is not None:
        merakc.save(folder, model, optimizer)
        model = parallel(lambda: Words(blocks=2), words(0), **{**layout, "offload": "none"})
        optimizer = _optimizer(kind, model)
        merakc.load(folder, model, optimizer)
    losses += [_step(model, optimizer, 3)]
    return losses, model.full_state_dict()


def both(layout: dict[str, Any], kind: str, asked: str, folder: Path | None) -> None:
    plain_losses, weights = trained(layout, kind)
    losses, ours = trained({**layout, "offload": asked}, kind, folder)
    assert losses == plain_losses
    assert ours.keys() == weights.keys()
    for name, value in weights.items():
        assert torch.equal(ours[name], value), name


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("adamw", "one rank"),
        ("adamw", "zero-3"),
        ("sgd", "tp"),
        ("adamw", "pp"),
        ("adamw", "bf16"),
        ("adamw", "fp16"),
    ],
)
def test_the_bits_are_those_of_an_update_on_the_device(
    kind: str, name: str, tmp_path: Path
) -> None:
    layout = LAYOUTS[name]
    ranks = layout.get("dp", 1) * layout.get("tp", 1) * layout.get("pp", 1)
    # What few bytes hold is some parameters, and not all.
    asked = "optimizer, 6 kB" if name == "one rank" else "optimizer"
    run_ranks(ranks, both, layout, kind, asked, tmp_path)


@pytest.mark.parametrize("name", ["one rank", "dp, pp", "zero-3", "tp, bf16", "pp", "fp16"])
def test_so_are_those_of_parameters_that_are_fetched(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    ranks = layout.get("dp", 1) * layout.get("tp", 1) * layout.get("pp", 1)
    run_ranks(ranks, both, layout, "adamw", "parameters", tmp_path)


def frozen(offload: str) -> tuple[list[float], Tensors]:
    """Steps of a model of which every other parameter is frozen."""

    def some_frozen() -> nn.Module:
        net = Words(blocks=2)
        for parameter in [*net.parameters()][::2]:
            parameter.requires_grad_(False)
        return net

    model = parallel(some_frozen, words(0), micro_batches=2, offload=offload)
    for _, parameter in model.named_parameters():
        assert is_beside(plain(parameter)) == (offload == "parameters")
    optimizer = _optimizer("adamw", model)
    return [_step(model, optimizer, n) for n in range(3)], model.full_state_dict()


def test_frozen_parameters_are_fetched_and_stay_as_they_are() -> None:
    ((before, theirs),) = run_ranks(1, frozen, "none")
    ((losses, ours),) = run_ranks(1, frozen, "parameters")
    assert losses == before
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def untied(offload: str) -> tuple[list[float], Tensors]:
    """Steps of layers that share parameters, and then have their own."""

    def sharing() -> nn.Module:
        net = Words(blocks=3)
        merakc.share_layers(net)
        return net

    model = parallel(sharing, words(0), micro_batches=2, offload=offload)
    optimizer = _optimizer("adamw", model)
    losses = [_step(model, optimizer, n) for n in range(2)]
    before = len(model.plan.parameters)
    merakc.untie_layers(model, optimizer)
    assert len(model.plan.parameters) > before
    every = {n for n, _ in model.named_parameters()}
    assert set(model.plan.host_parameters) == (every if offload == "parameters" else set())
    return [*losses, *(_step(model, optimizer, n) for n in range(2, 4))], model.full_state_dict()


def test_layers_are_untied_where_they_are() -> None:
    ((before, theirs),) = run_ranks(1, untied, "none")
    for offload in ("optimizer", "parameters"):
        ((losses, ours),) = run_ranks(1, untied, offload)
        assert losses == before
        assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def test_an_optimizer_of_whole_matrices() -> None:
    run_ranks(2, both, LAYOUTS["zero-1"], "muon", "optimizer", None)
