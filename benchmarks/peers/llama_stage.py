"""Some of a Llama's layers, as users of torch's and DeepSpeed's pipelines write them by hand."""

from __future__ import annotations

from itertools import combinations

import torch
import torch.nn.functional as F
from torch import nn


class LlamaStage(nn.Module):
    """The layers of `which`; the first stage has the embedding, the last the norm and the head.

    Takes and gives [batch, sequence, hidden]; the first takes words [batch, sequence], the last
    gives logits [batch, sequence, vocabulary].
    """

    def __init__(self, model: nn.Module, which: range, *, first: bool, last: bool) -> None:
        super().__init__()
        self.embed_tokens = model.model.embed_tokens if first else None
        self.layers = nn.ModuleDict({str(k): model.model.layers[k] for k in which})
        self.norm = model.model.norm if last else None
        self.lm_head = model.lm_head if last else None
        self.rotary_emb = model.model.rotary_emb

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A micro-batch through these layers."""
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
        positions = torch.arange(x.shape[1]).unsqueeze(0)
        rotary = self.rotary_emb(x, positions)
        for layer in self.layers.values():
            x = layer(x, position_embeddings=rotary)
        if self.lm_head is not None:
            x = self.lm_head(self.norm(x))
        return x


def next_word_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy of each position's next word."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def cut(layers: int, stages: int, head_layers: float) -> list[range]:
    """The layers of each stage such that the longest is shortest; the head counts `head_layers`."""

    def longest(bounds: tuple[int, ...]) -> list[float]:
        sizes = [float(b - a) for a, b in zip((0, *bounds), (*bounds, layers), strict=True)]
        sizes[-1] += head_layers
        return sorted(sizes, reverse=True)

    bounds = min(combinations(range(1, layers), stages - 1), key=longest)
    return [range(a, b) for a, b in zip((0, *bounds), (*bounds, layers), strict=True)]


def head_layers(model: nn.Module) -> float:
    """What the head weighs, in layers, by parameters: each is multiplied with every word once."""
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    return model.lm_head.weight.numel() / layer


def original_name(name: str) -> str:
    """What the model calls a stage's parameter."""
    name = name.removeprefix("module.")  # DistributedDataParallel's
    return name if name.startswith("lm_head") else f"model.{name}"
