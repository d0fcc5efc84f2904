"""Bags of embeddings beside eager, and in parts of a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import merakc
from tests.frontend.against_eager import check
from tests.frontend.small import Small

F64 = torch.float64
WORDS = torch.randint(9, (8, 5), generator=torch.Generator().manual_seed(0))
WORDS[3] = 2  # nothing but padding


def bag(mode: str, padding: int | None) -> nn.EmbeddingBag:
    torch.manual_seed(0)
    return nn.EmbeddingBag(9, 4, mode=mode, padding_idx=padding, dtype=F64)


def weighed(s: Any, words: Tensor, weights: Tensor) -> Tensor:
    return s.bag(words, per_sample_weights=weights).square().sum()


@pytest.mark.parametrize("padding", [None, 2, -7])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_one_size(mode: str, padding: int | None) -> None:
    made = Small(lambda s, x: s.bag(x).square().sum(), bag=bag(mode, padding))
    graph = check(made, WORDS, relative=1e-12).graph
    assert not any("bag" in node.op for node in graph.nodes)


@pytest.mark.parametrize("padding", [None, 2])
def test_weighed_words(padding: int | None) -> None:
    weights = torch.rand(8, 5, dtype=F64, generator=torch.Generator().manual_seed(1))
    check(Small(weighed, bag=bag("sum", padding)), WORDS, weights, relative=1e-12)


def test_bags_one_behind_the_other_are_torchs() -> None:
    starts = torch.tensor([0, 3, 3, 20])
    made = Small(lambda s, x, at: s.bag(x, at).square().sum(), bag=bag("mean", 2))
    check(made, WORDS.flatten(), starts, relative=1e-12)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = bag("mean", 2), nn.Linear(4, 3, dtype=F64)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.bag(words).tanh()).square().mean()


def test_samples_run_in_micro_batches() -> None:
    plain, model = Model(), Model()
    plain.load_state_dict(model.state_dict())
    parallel = merakc.auto_parallel(model, WORDS, dp=1, micro_batches=4)
    losses = plain(WORDS), parallel(WORDS)
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-10, atol=0)
    for name, gradient in parallel.full_gradients().items():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad, rtol=1e-10, atol=1e-14)
