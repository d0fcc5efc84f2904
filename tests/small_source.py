"""Models and batches that tests name as MODULE:FUNCTION."""

from __future__ import annotations

import torch
from torch import nn

from tests.batch_models import TimeFirst


class Two(nn.Module):
    """Two layers, and a loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        """The mean is over the samples."""
        return {"loss": (self.second(torch.tanh(self.first(x))) * scale).square().mean()}


class Deep(nn.Module):
    """Equal blocks of products, and a loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        wide = ((nn.Linear(width, 4 * width), nn.Linear(4 * width, width)) for _ in range(24))
        self.blocks = nn.ModuleList(nn.Sequential(up, nn.Tanh(), down) for up, down in wide)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """The mean is over the samples."""
        for block in self.blocks:
            x = x + block(x)
        return {"loss": x.square().mean()}


def small() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Two(16), {"x": torch.ones(4, 8), "scale": torch.ones(())}


def deep() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    with torch.device("meta"):
        return Deep(2048), {"x": torch.zeros(4, 512, 2048, device="cpu")}


def wide() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Two(32), {"x": torch.ones(4, 8), "scale": torch.ones(())}


def numbered() -> tuple[nn.Module, dict[str, torch.Tensor], int]:
    return nn.Linear(2, 2), {}, 3


def no_model() -> tuple[int, int]:
    return 1, 2


def nothing() -> None:
    return None


def fails() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    sizes: dict[str, int] = {}
    return Two(sizes["width"]), {}


def four() -> tuple[int, int, int, int]:
    return 1, 2, 3, 4


def time_first() -> tuple[nn.Module, dict[str, torch.Tensor], dict[str, int]]:
    batch = {"x": torch.ones(5, 8, 6), "y": torch.arange(8) % 3}
    return TimeFirst(), batch, {"x": 1}


def misfit() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Two(16), {"x": torch.ones(4, 9), "scale": torch.ones(())}


def lossless() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return nn.Linear(8, 8), (torch.ones(4, 8),)


class Branching(Two):
    """Whose second layer is run where the batch says so."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss of samples, or of their first layer alone."""
        if x.sum() > 0:
            return super().forward(x, scale)
        return {"loss": (self.first(x) * scale).square().mean()}


def branching() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model that branches on values, and a batch that its other branch is not for."""
    return Branching(8), {"x": torch.ones(4, 8), "scale": torch.ones(4, 1)}
