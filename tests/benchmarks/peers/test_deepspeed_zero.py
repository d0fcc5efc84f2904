"""DeepSpeed lives in an environment of its own: here, what it is asked for."""

from __future__ import annotations

import importlib
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.peers.training import Training

TINY = Training(ranks=1, samples=2, sequence=8, hidden=16, layers=1, vocabulary=32)


class Engine(nn.Module):
    """Trains as `deepspeed.initialize` promises."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.model, self.optimizer = model, optimizer

    def forward(self, **batch: torch.Tensor) -> Any:
        return self.model(**batch)

    def backward(self, loss: torch.Tensor) -> None:
        torch.autograd.backward(loss)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize("stage", range(4))
def test_asks_for_the_stage_and_steps(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    gathered: list[bool] = []

    def initialize(model: nn.Module, optimizer: Any, config: dict[str, Any]) -> tuple[Any, ...]:
        asked.update(config)
        return Engine(model, optimizer), optimizer, None, None

    def gather(parameters: list[nn.Parameter], enabled: bool) -> Any:
        gathered.append(enabled)
        return nullcontext()

    fake: Any = ModuleType("deepspeed")
    fake.initialize, fake.zero = initialize, SimpleNamespace(GatheredParameters=gather)
    monkeypatch.setitem(sys.modules, "deepspeed", fake)
    monkeypatch.delitem(sys.modules, "benchmarks.peers.deepspeed_zero", raising=False)
    module = importlib.import_module("benchmarks.peers.deepspeed_zero")
    contestant = module.build(TINY, f"zero-{stage}", 0)
    before = contestant.weights()
    contestant.step(TINY.batch(0))
    assert any(not torch.equal(p, before[name]) for name, p in contestant.weights().items())
    assert asked["zero_optimization"]["stage"] == stage
    assert asked["gradient_clipping"] == 0.0
    assert asked["train_micro_batch_size_per_gpu"] == TINY.samples
    assert gathered == [stage == 3] * 2
