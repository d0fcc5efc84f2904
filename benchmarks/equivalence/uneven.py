"""A model whose sizes are primes, with parameters of fewer elements than there are ranks."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.models import Batch, ModelCase
from benchmarks.zoo_models.batches import samples

INPUTS, HIDDEN, WIDE, OUTPUTS, BLOCKS = 5, 7, 13, 3, 4


class UnevenBlock(nn.Module):
    """A residual block with a scalar, one element and three elements among its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, WIDE, bias=False)
        self.down = nn.Linear(WIDE, HIDDEN)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.offset = nn.Parameter(torch.tensor([0.1]))
        self.mix = nn.Parameter(torch.tensor([0.2, -0.1, 0.3]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[batch, hidden]` to the same."""
        wide = self.up(x) + self.offset
        share = self.mix.softmax(0)
        y = share[0] * wide.tanh() + share[1] * wide.sigmoid() + share[2] * wide.sin()
        out: torch.Tensor = x + self.scale * self.down(y)
        return out


class Uneven(nn.Module):
    """Blocks between two linear layers; every block divides by one temperature that they share."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, HIDDEN)
        self.blocks = nn.ModuleList(UnevenBlock() for _ in range(BLOCKS))
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.last = nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        """The mean squared distance of `[batch, inputs]` from `[batch, outputs]`."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x) / self.temperature
        return {"loss": (self.last(x) - target).pow(2).mean()}


def _batch(batch_size: int, generator: torch.Generator) -> Batch:
    x = torch.randn(batch_size, INPUTS, generator=generator)
    return {"x": x, "target": torch.randn(batch_size, OUTPUTS, generator=generator)}


UNEVEN = ModelCase("uneven", lambda _: Uneven(), _batch, samples)
