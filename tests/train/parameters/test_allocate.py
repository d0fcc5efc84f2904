"""Averages of weights, and copies of models, are those of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from benchmarks.ranks import run_ranks
from merakc.train.model import ParallelModel
from tests.battery.small_models import Tensors, assert_close, build, parallel, part, warm_up, words

LAYOUTS: dict[str, dict[str, Any]] = {
    "zero-1": {"dp": 2, "state_shards": "zero-1"},
    "tp": {"dp": 1, "tp": 2},
}


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    warm_up()


class Counted(nn.Module):
    """A model with dropout, statistics of batches and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Embedding(16, 8), nn.LayerNorm(8)
        self.drop, self.last = nn.Dropout(0.0), nn.Linear(8, 16)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Tensors:
        """The loss, and the logits."""
        if self.training:
            self.calls += 1
        logits = self.last(self.drop(self.norm(self.first(ids))))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def given(model: nn.Module, seed: int) -> Tensors:
    return part(words(seed), model) if isinstance(model, ParallelModel) else words(seed)


def whole(model: nn.Module) -> Tensors:
    return model.full_state_dict() if isinstance(model, ParallelModel) else dict(model.state_dict())


def evaluated(model: Any, batch: Tensors) -> float:
    model.eval()
    with torch.no_grad():
        return float(model(**batch)["loss"])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
    loss = model(**given(model, seed))["loss"]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def followed(model: nn.Module) -> tuple[list[float], list[Tensors]]:
    """Trains with four averages, one by hand, and then a copy; what each tells and holds."""
    averages = [
        AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
        AveragedModel(model, avg_fn=get_ema_avg_fn(0.8), use_buffers=True),
        AveragedModel(model),
    ]
    own = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        train(model, optimizer, step)
        for average in averages:
            average.update_parameters(model)
        for name, p in model.named_parameters():
            own[name].lerp_(p.detach(), 0.1)
    told = [evaluated(a, given(model, 9)) for a in averages]
    assert model.training  # which a copy's modes leave alone
    twin = copy.deepcopy(model)
    again = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    told += [train(m, o, 7) for m, o in ((model, optimizer), (twin, again))]
    assert told[-1] == told[-2]
    before = [p.data for p in model.parameters()]
    for name, p in model.named_parameters():
        p.data = own[name].as_subclass(torch.Tensor)
    told.append(evaluated(model, given(model, 9)))
    for p, old in zip(model.parameters(), before, strict=True):
        p.data = old
    return told, [whole(m) for m in (*(a.module for a in averages), twin, model)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_averages_and_copies_are_those_of_one_process(layout: str) -> None:
    told, weights = followed(build(Counted))
    assert len({*told[:3], told[-1]}) == 4
    options = LAYOUTS[layout]
    ranks = run_ranks(2, lambda: followed(parallel(Counted, words(0), **options)))
    for found, _ in ranks:
        assert found == pytest.approx(told, rel=1e-12)
    for ours, plain in zip(ranks[0][1], weights, strict=True):
        assert_close(ours, plain)


def test_what_holds_a_model_is_copied_with_its_parts() -> None:
    model, calls = parallel(Counted, words(0), dp=1), list[int]()
    model.register_forward_hook(lambda *_: calls.append(1))
    twin: Any = copy.deepcopy(nn.ModuleDict({"model": model, "last": model.last}))
    assert twin["last"] is twin["model"].last
    assert twin["last"] is not model.last
    twin["model"](**words(0))
    assert calls == [1]
