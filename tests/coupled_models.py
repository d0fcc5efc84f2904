"""Small models whose loss couples the samples of a batch, and what each part of one hands over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from merakc.ir.batches import BatchLayout, ShareKind
from merakc.lowering.recording import record_part
from merakc.passes.batches.recorded import BatchRecording

Tensors = dict[str, torch.Tensor]
WIDTH, EXPERTS = 8, 3


class Tower(nn.Module):
    """Residual blocks of their own for one kind of input, and a projection."""

    def __init__(self, blocks: int, width: int = WIDTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(blocks)
        )
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Features, a row for each sample."""
        for block in self.blocks:
            x = x + block(x)
        found: torch.Tensor = self.out(x)
        return found


class Towers(nn.Module):
    """Two towers and a contrastive loss in which every sample meets every other.

    Samples with one label are no negatives of each other, and a mask leaves samples out.
    """

    def __init__(self, blocks: int = 2, width: int = WIDTH) -> None:
        super().__init__()
        self.image, self.text = Tower(blocks, width), Tower(blocks, width)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(
        self, pixels: torch.Tensor, words: torch.Tensor, labels: torch.Tensor, keep: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """The loss, and how like every image is to every text."""
        a = F.normalize(self.image(pixels), dim=-1)
        b = F.normalize(self.text(words), dim=-1)
        logits = a @ b.T * self.scale.exp()
        same = (labels[:, None] == labels[None]).to(logits.dtype)
        share = same / same.sum(1, keepdim=True)
        each = -(share * logits.log_softmax(-1)).sum(-1) - (share.T * logits.log_softmax(0)).sum(0)
        kept = keep.to(logits.dtype)
        return {"loss": (each * kept).sum() / kept.sum(), "logits": logits}


class Wide(nn.Module):
    """Samples meet at hidden units, which tensor parallelism splits."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.last = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss."""
        z = F.gelu(self.last(x + self.block(x)))
        return {"loss": (z @ z.T).logsumexp(-1).mean()}


class Routed(nn.Module):
    """Layers whose gates are to be used evenly over the whole batch."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.gates = nn.ModuleList(nn.Linear(WIDTH, EXPERTS) for _ in range(layers))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss."""
        uneven = x.new_zeros(())
        for layer, gate in zip(self.layers, self.gates, strict=True):
            chances = gate(x).softmax(-1)
            chosen = F.one_hot(chances.argmax(-1), EXPERTS).sum(0)
            uneven = uneven + (chances.sum(0) / len(x) * (chosen / len(x))).sum()
            x = x + torch.tanh(layer(x)) * chances.amax(-1, keepdim=True)
        return {"loss": (x - y).square().sum() / len(x) + 0.1 * uneven}


@dataclass(frozen=True)
class Coupled:
    """A model, its batches by their sizes, and what its parts hand over, sorted by kind."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], Tensors]
    ends: tuple[ShareKind, ...]
    results: bool = False  # whether the rest of what it returns is wanted

    def model(self) -> nn.Module:
        """The model in float64, the same at every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.make().double()

    def rank_batch(self, layout: BatchLayout) -> Tensors:
        """The samples of this dp rank."""
        first = layout.first(0)
        return {n: v[first : first + layout.own] for n, v in self.batch(layout.total).items()}

    def record(self, layout: BatchLayout) -> BatchRecording:
        """Its forward of this dp rank's first micro-batch."""
        return record_part(self.model(), (), self.rank_batch(layout), layout, torch.device("cpu"))


def towers_batch(samples: int, width: int = WIDTH) -> Tensors:
    generator = torch.Generator().manual_seed(1)
    return {
        "pixels": torch.randn(samples, width, generator=generator).double(),
        "words": torch.randn(samples, width, generator=generator).double(),
        "labels": torch.randint(0, samples, (samples,), generator=generator),
        "keep": torch.arange(samples) % 5 != 3,
    }


def wide_batch(samples: int) -> Tensors:
    return {"x": towers_batch(samples)["pixels"]}


def routed_batch(samples: int) -> Tensors:
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(2, samples, WIDTH, generator=generator).double()
    return {"x": x, "y": y}


# Features of both kinds of input, and the scale of all; labels and masks are known before.
TOWERS = Coupled(Towers, towers_batch, (ShareKind.CONSTANT, ShareKind.ROWS, ShareKind.ROWS))
WIDE = Coupled(Wide, wide_batch, (ShareKind.ROWS,))
# Of each layer how often every expert is chosen, and its chances; the loss of the samples.
ROUTED = Coupled(Routed, routed_batch, (ShareKind.SUM,) * 9)
