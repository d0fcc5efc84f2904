"""DeepSpeed lives in an environment of its own: here, what it is asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.peers.training import largest_error, train_alone
from tests.benchmarks.peers import comparing
from tests.benchmarks.peers.comparing import TINY, replace


class Pipe(nn.Module):
    """All layers on one rank."""

    def __init__(self, layers: list[nn.Module], **given: Any) -> None:
        super().__init__()
        self.layers, self.given = nn.Sequential(*layers), given


class Engine:
    """Trains as `train_batch` promises."""

    def __init__(self, model: Pipe, optimizer: torch.optim.Optimizer, parts: int) -> None:
        self.model, self.optimizer, self.parts = model, optimizer, parts

    def train_batch(self, data: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for words, labels in data:
            loss = self.model.given["loss_fn"](self.model.layers(words), labels)
            (loss / self.parts).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def test_hands_over_layers_and_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def initialize(model: Pipe, optimizer: Any, config: dict[str, Any]) -> tuple[Any, ...]:
        asked.update(config | model.given)
        return Engine(model, optimizer, config["gradient_accumulation_steps"]), None

    fake: Any = ModuleType("deepspeed")
    fake.initialize, fake.init_distributed = initialize, lambda dist_backend: None
    pipe: Any = ModuleType("deepspeed.pipe")
    pipe.PipelineModule = Pipe
    monkeypatch.setitem(sys.modules, "deepspeed", fake)
    monkeypatch.setitem(sys.modules, "deepspeed.pipe", pipe)
    name = "benchmarks.peers.deepspeed_pipeline"
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    monkeypatch.setattr(module, "gathered", lambda parts, training, rank: parts)
    training = replace(TINY, ranks=1, micro_batches=2)
    contestant = module.build(training, "1f1b", 0)
    for step in range(comparing.STEPS):
        contestant.step(training.batch(step))
    before, after = train_alone(training, comparing.STEPS)
    assert largest_error(contestant.weights(), before, after) < 1e-3
    assert asked["train_micro_batch_size_per_gpu"] == 1
    assert asked["gradient_accumulation_steps"] == 2
    assert asked["gradient_clipping"] == 0.0
    assert asked["num_stages"] == 1
