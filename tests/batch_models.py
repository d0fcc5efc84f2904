"""Models whose batches hold their samples in other places than dim 0 of everything, with batches of
8 samples.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

SAMPLES, WORDS, IMAGE = 8, 11, 10


class TimeFirst(nn.Module):
    """A recurrent network as torch makes it; `every` step is labelled, or the last one."""

    def __init__(self, *, every: bool = False) -> None:
        super().__init__()
        self.first, self.cell = nn.Linear(6, 8), nn.LSTM(8, 8)
        self.last, self.every = nn.Linear(8, 3), every

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h, _ = self.cell(self.first(x))
        z = self.last(h if self.every else h[-1])
        return F.cross_entropy(z.reshape(-1, 3), y.reshape(-1))


class Translator(nn.Module):
    """torch's own transformer, which is time-first unless it is told otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of nested tensors, which it has none of
            self.body = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0)

    def forward(self, src: torch.Tensor, tgt: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        z = self.last(self.body(self.embed(src), self.embed(tgt)))
        return F.cross_entropy(z.view(-1, WORDS), labels.view(-1))


class Illustrated(nn.Module):
    """Texts with two images each, which stand before the words, or where a mask says."""

    def __init__(self, *, by_mask: bool = False) -> None:
        super().__init__()
        self.see, self.embed = nn.Linear(5, 8), nn.Embedding(WORDS, 8)
        self.mix, self.last, self.by_mask = nn.Linear(8, 8), nn.Linear(8, 3), by_mask

    def forward(self, images: torch.Tensor, ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen, words = self.see(images).tanh(), self.embed(ids)
        if self.by_mask:
            mask = (ids == IMAGE).unsqueeze(-1).expand_as(words)
            words = words.masked_scatter(mask, seen)
        else:
            words = torch.cat([words, seen.view(len(ids), -1, 8)], 1)
        return F.cross_entropy(self.last(self.mix(words).tanh().mean(1)), y)


class Weighted(nn.Module):
    """One vector for all samples: the weights of the classes."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, classes)

    def forward(self, x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.last(self.first(x).tanh()), y, weight=w)


class Masked(nn.Module):
    """Attention under a mask that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
        self.body = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = self.last(self.body(self.embed(ids), src_mask=mask))
        return F.cross_entropy(z.view(-1, WORDS), y.view(-1))


class Boxes(nn.Module):
    """A loss over lists with a tensor for each sample, of a length of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, boxes: list[torch.Tensor]) -> torch.Tensor:
        found = self.last(self.first(x).tanh())
        losses = [(f - b).abs().sum(-1).amin() for f, b in zip(found, boxes, strict=False)]
        return torch.stack(losses).mean()


@dataclass
class Target:
    """Labels in a dataclass, one in another."""

    y: torch.Tensor
    more: Any = None


class Nested(nn.Module):
    """Reads its labels from a dataclass in a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, target: Target) -> torch.Tensor:
        losses = F.cross_entropy(self.last(self.first(x).tanh()), target.y, reduction="none")
        return (losses * target.more.y).mean()


def _words(*shape: int, below: int = WORDS) -> torch.Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(sum(shape)))


def _numbers(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def illustrated(images: int = 2) -> torch.Tensor:
    """Texts of 7 words, of which so many in a row are images, elsewhere in each."""
    ids = _words(SAMPLES, 7, below=IMAGE)
    for k in range(SAMPLES):
        ids[k, k % 5 : k % 5 + images] = IMAGE
    return ids


Case = tuple[Callable[[], nn.Module], dict[str, Any]]
_UPPER = torch.ones(8, 8, dtype=torch.bool).triu(1)
_IMAGES = _numbers(2 * SAMPLES, 5)
CASES: dict[str, Case] = {
    "time first": (TimeFirst, {"x": _numbers(5, 8, 6), "y": _words(8, below=3)}),
    "time first, all labelled": (
        lambda: TimeFirst(every=True), {"x": _numbers(5, 8, 6), "y": _words(5, 8, below=3)},
    ),
    "as many steps as samples": (
        lambda: TimeFirst(every=True), {"x": _numbers(8, 8, 6), "y": _words(8, 8, below=3)},
    ),
    "translator": (
        Translator, {"src": _words(6, 8), "tgt": _words(5, 8), "labels": _words(5, 8)},
    ),
    "translator, texts of one length": (
        Translator, {"src": _words(4, 8), "tgt": _words(4, 8), "labels": _words(4, 8)},
    ),
    "translator, as many words as samples": (
        Translator, {"src": _words(8, 8), "tgt": _words(8, 8), "labels": _words(8, 8)},
    ),
    "two images a text": (
        Illustrated, {"images": _IMAGES, "ids": _words(8, 7), "y": _words(8, below=3)},
    ),
    "two images a text, by a mask": (
        lambda: Illustrated(by_mask=True),
        {"images": _IMAGES, "ids": illustrated(), "y": _words(8, below=3)},
    ),
    "one vector for all": (
        lambda: Weighted(4),
        {"x": _numbers(8, 6), "y": _words(8, below=4), "w": _numbers(4).exp()},
    ),
    "one vector for all, as long as the batch": (
        lambda: Weighted(8),
        {"x": _numbers(8, 6), "y": _words(8, below=8), "w": _numbers(8).exp()},
    ),
    "a mask as wide as the batch": (
        Masked, {"ids": _words(8, 8), "mask": _UPPER, "y": _words(8, 8)},
    ),
    "nested dataclasses": (
        Nested,
        {"x": _numbers(8, 6), "target": Target(_words(8, below=3), Target(_numbers(8).exp()))},
    ),
}  # fmt: skip
# Where the samples stand, as users would say it; for others by the commonest size of dim 0.
DIMS: dict[str, dict[str, Any]] = {
    "time first": {"x": 1, "y": 0},
    "time first, all labelled": {"x": 1, "y": 1},
    "as many steps as samples": {"x": 1, "y": 1},
    "translator": {"src": 1, "tgt": 1, "labels": 1},
    "translator, texts of one length": {"src": 1, "tgt": 1, "labels": 1},
    "translator, as many words as samples": {"src": 1, "tgt": 1, "labels": 1},
    "two images a text": {"images": (0, None), "ids": 0, "y": 0},
    "two images a text, by a mask": {"images": (0, None), "ids": 0, "y": 0},
    "one vector for all, as long as the batch": {"x": 0, "y": 0, "w": None},
    "a mask as wide as the batch": {"ids": 0, "mask": None, "y": 0},
}


def made(name: str) -> nn.Module:
    """The model of a case."""
    torch.manual_seed(0)
    return CASES[name][0]().double()


def boxes() -> dict[str, Any]:
    """A batch of 8 samples with 3 to 7 boxes each."""
    return {"x": _numbers(8, 6), "boxes": [_numbers(3 + 2 * (k % 3), 4) for k in range(8)]}


def reference(name: str) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and the gradients of the plain model in one process."""
    model = made(name)
    loss = model(**CASES[name][1])
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
