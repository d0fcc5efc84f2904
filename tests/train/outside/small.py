"""Models that return no loss, and what trains them in a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import merakc
from merakc.machines.cluster import NOMINAL_CPU
from merakc.train.model import ParallelModel
from tests.battery.small_models import WORDS, Tensors, Words, assert_close, build, gradients

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.randint(0, 3, (8,), generator=torch.Generator().manual_seed(1))


class Bare(Words):
    """The language model without its loss."""

    def __init__(self) -> None:
        super().__init__(blocks=2)

    def forward(self, ids: torch.Tensor) -> Tensors:  # type: ignore[override]
        """The logits, and what they are made of."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        x = self.norm(x)
        return {"logits": self.head(x), "x": x}


class Normed(nn.Module):
    """A classifier with a batch norm and dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.dropout, self.last = nn.Dropout(dropout), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The logits."""
        out: torch.Tensor = self.last(self.dropout(torch.relu(self.norm(self.first(x)))))
        return out


def cross_entropy(outputs: Tensors, batch: Tensors) -> torch.Tensor:
    """That of the logits."""
    return F.cross_entropy(outputs["logits"].view(-1, WORDS), batch["labels"].view(-1))


def normed(dropout: float = 0.0, **options: Any) -> ParallelModel:
    """The classifier, to be trained with a loss outside."""
    model = build(lambda: Normed(dropout))
    return merakc.auto_parallel(model, X, cluster=NOMINAL_CPU, **options)


def alike(loop: Callable[[Any], object]) -> object:
    """What a loop gives of the parallel classifier: the same as of the plain one, and so are
    gradients and state after it.
    """
    ours, plain = normed(), build(Normed)
    found, wanted = loop(ours), loop(plain)
    assert found == wanted
    assert_close(ours.full_gradients(), gradients(plain))
    assert_close(ours.full_state_dict(), plain.state_dict())
    return found
