"""Layers that share parameters and get their own in the middle of a run, against one process."""

from __future__ import annotations

import copy
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import merakc
from benchmarks.ranks import run_ranks
from merakc.errors import CheckpointError, ConfigError
from merakc.machines.cluster import NOMINAL_CPU
from merakc.train.model import ParallelModel
from tests.battery.small_models import Tensors, Words, build, first_part, part, warm_up, words

LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": {"dp": 1, "pp": 2, "micro_batches": 2},
    "zero-1": {"dp": 2, "state_shards": "zero-1", "precision": None},
}


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    warm_up()


def trained_by(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": rest, "weight_decay": 0.0}, {"params": decayed}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def started(**layout: Any) -> tuple[Any, torch.optim.Optimizer, Any]:
    """A model whose layers share, a plain one where no layout is given, and what trains it."""
    model: Any = build(Words)
    merakc.share_layers(model)
    if layout:
        example = first_part(words(0), layout["dp"])
        model = merakc.auto_parallel(model, example, cluster=NOMINAL_CPU, **layout)
    return model, *trained_by(model)


def train(model: Any, optimizer: Any, schedule: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        batch = words(step)
        loss = model(**(part(batch, model) if isinstance(model, ParallelModel) else batch))["loss"]
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def whole(model: nn.Module) -> Tensors:
    if isinstance(model, ParallelModel):
        return model.full_state_dict()
    return {name: t.detach().clone() for name, t in model.state_dict().items()}


def pseudo_to_real(folder: Path, **layout: Any) -> Any:
    """Losses, weights and sizes of a run that shares for three steps, is saved, and then does not
    share.
    """
    model, optimizer, schedule = started(**layout)
    losses = train(model, optimizer, schedule, range(3))
    merakc.save(folder / "run", model, optimizer, schedule)
    before, count = whole(model), len(list(model.parameters()))
    shared = merakc.untie_layers(model, optimizer)
    losses += train(model, optimizer, schedule, range(3, 6))
    return losses, before, whole(model), (count, len(list(model.parameters()))), shared


@cache
def by_hand() -> tuple[list[float], Tensors, Tensors]:
    """The same in plain PyTorch alone."""
    model: Any = build(Words)
    for block in model.blocks[1:]:
        for own, first in zip(block.modules(), model.blocks[0].modules(), strict=True):
            own._parameters.update(first._parameters)
    optimizer, schedule = trained_by(model)
    losses, before = train(model, optimizer, schedule, range(3)), whole(model)
    for module in model.blocks[1:].modules():
        for name, p in module._parameters.items():
            q = module._parameters[name] = nn.Parameter(p.detach().clone())
            optimizer.state[q] = {key: t.clone() for key, t in optimizer.state[p].items()}
            optimizer.param_groups[p.dim() - 1]["params"].append(q)
    losses += train(model, optimizer, schedule, range(3, 6))
    return losses, before, whole(model)


def assert_same(ours: Tensors, plain: Tensors) -> None:
    assert ours.keys() == plain.keys()
    for name, value in plain.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-10, msg=name)


def gone_on(folder: Path, **layout: Any) -> Any:
    """Losses and weights of a run that loads what was saved while layers shared, and does not."""
    model: Any = build(Words, seed=1)
    if layout:
        example = first_part(words(0), layout["dp"])
        model = merakc.auto_parallel(model, example, cluster=NOMINAL_CPU, **layout)
    optimizer, schedule = trained_by(model)
    with pytest.raises(CheckpointError, match=r"'blocks.1.0.bias' is 'blocks.0.0.bias': untied=Tr"):
        merakc.load(folder, model, optimizer, schedule)
    merakc.load(folder, model, optimizer, schedule, untied=True)
    return train(model, optimizer, schedule, range(3, 6)), whole(model)


@pytest.mark.parametrize("name", ["plain", *LAYOUTS])
def test_every_layer_goes_on_by_itself(name: str, tmp_path: Path) -> None:
    """In the run itself, and in others from its checkpoint of tied layers."""
    losses, before, after = by_hand()
    assert not torch.equal(after["blocks.0.1.weight"], after["blocks.3.1.weight"])
    layout = LAYOUTS.get(name, {})
    run = partial(pseudo_to_real, tmp_path, **layout)
    found = run_ranks(2, run) if layout else [run()]
    for own in found:
        assert own[0] == pytest.approx(losses, abs=1e-10)
        assert own[3:] == ((3 + 6, 3 + 4 * 6), found[0][4])
    assert_same(found[0][1], before)
    assert_same(found[0][2], after)
    others = [gone_on(tmp_path)] if layout else []
    if name == "zero-1":
        others += run_ranks(2, partial(gone_on, tmp_path, dp=1, tp=2))[:1]
    for later, weights in others:
        assert later == pytest.approx(losses[3:], abs=1e-10)
        assert_same(weights, after)


def test_what_is_left_over_is_refused() -> None:
    for layout in ({}, {"dp": 1}):
        model, optimizer, schedule = started(**layout)
        train(model, optimizer, schedule, range(2))
        other = torch.optim.SGD(model.parameters(), lr=0.1)
        left, before = model(**words(0)), copy.deepcopy(whole(model))
        hook = model.get_parameter("blocks.0.0.bias").register_hook(lambda _: None)
        with pytest.raises(ConfigError, match="a hook is registered on"):
            merakc.untie_layers(model, optimizer)
        hook.remove()
        merakc.untie_layers(model, optimizer)
        assert all(torch.equal(value, before[key]) for key, value in whole(model).items())
        with pytest.raises(ConfigError, match=r"is used as it was before merakc\.untie_layers"):
            left["loss"].backward()
        with pytest.raises(ConfigError, match=r"is used as it was before merakc\.untie_layers"):
            other.step()
        train(model, optimizer, schedule, range(1))
        with pytest.raises(ConfigError, match="share_layers was not called on this Words"):
            merakc.untie_layers(model, optimizer)


@pytest.mark.parametrize("layout", [{}, {"dp": 1}])
def test_a_refusal_changes_nothing(layout: dict[str, Any]) -> None:
    model, optimizer, schedule = started(**layout)
    train(model, optimizer, schedule, range(1))
    together = torch.optim.LBFGS(model.parameters())
    names = [n for n, _ in model.named_parameters()]
    options = {"tp": 3} if layout else {"dp": 1}
    with pytest.raises(ConfigError, match=r"tp=3|options are auto_parallel's"):
        merakc.untie_layers(model, optimizer, **options)
    with pytest.raises(ConfigError, match="LBFGS updates parameters together"):
        merakc.untie_layers(model, [optimizer, together])
    with pytest.raises(ConfigError, match="share no parameters with each other alone"):
        merakc.untie_layers(model, optimizer, layers=["embedding", "norm"])
    model(**words(1))["loss"].backward()
    with pytest.raises(ConfigError, match="has a gradient, of which untie_layers"):
        merakc.untie_layers(model, optimizer)
    optimizer.zero_grad()
    assert [n for n, _ in model.named_parameters()] == names
    losses = train(model, optimizer, schedule, range(1, 3))
    merakc.untie_layers(model, optimizer, layers="blocks")
    losses += train(model, optimizer, schedule, range(3, 6))
    assert losses == pytest.approx(by_hand()[0][1:], abs=1e-10)
