"""Models and batches that tests name as MODULE:FUNCTION."""

from __future__ import annotations

import torch
from torch import nn


class Two(nn.Module):
    """Two layers, and a loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        """The mean is over the samples."""
        return {"loss": (self.second(torch.tanh(self.first(x))) * scale).square().mean()}


def small() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Two(16), {"x": torch.ones(4, 8), "scale": torch.ones(())}


def wide() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Two(32), {"x": torch.ones(4, 8), "scale": torch.ones(())}


def no_model() -> tuple[int, int]:
    return 1, 2


def nothing() -> None:
    return None
