"""Mixtures whose experts run in a loop, in plain PyTorch, as tutorials and research code have them.

Each layer has four experts of two linear layers. `index_add` and `masked_writes` are the two usual
loops; with `capacity` an expert takes no more than so many tokens of a text, the first ones; of
`uneven` one expert gets most tokens and the last none. `hit` is the same, in a loop over the
experts that have tokens, as transformers has them; the parameters of the last have no gradient
then. Experts of `normed` have a norm and a scale of their own, and masks are taken over choices.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import EVEN_VOCABULARY, HEADS, HIDDEN, WIDE, ModelCase, causal_batch, shifted

EXPERTS, CHOICES, CAPACITY = 4, 2, 3


class Expert(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, WIDE), nn.Linear(WIDE, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """`[rows, hidden]` to `[rows, hidden]`."""
        out: Tensor = self.down(F.silu(self.up(x)))
        return out


class NormedExpert(Expert):
    """The same between a norm and a scale of the expert's own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(HIDDEN), nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        """`[rows, hidden]` to `[rows, hidden]`."""
        return super().forward(self.norm(x)) * self.scale


class LoopedExperts(nn.Module):
    """A mixture of the `kind`, of `[batch, sequence, hidden]`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.router = kind, nn.Linear(HIDDEN, EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        if kind == "normed":
            self.experts = nn.ModuleList(NormedExpert() for _ in range(EXPERTS))
        if kind in ("uneven", "hit", "normed"):
            with torch.no_grad():
                self.router.bias.copy_(torch.tensor([2.0, 0.0, 0.0, -50.0]))

    def forward(self, x: Tensor) -> Tensor:
        """What the experts of each token make of it."""
        chances, flat = self.router(x).softmax(-1), x.reshape(-1, HIDDEN)
        form = {"masked_writes": self.written, "capacity": self.within_capacity, "hit": self.hit,
                "normed": self.by_any_choice}  # fmt: skip
        out = form.get(self.kind, self.added)(flat, chances)
        return out.view(x.shape)

    def added(self, x: Tensor, chances: Tensor) -> Tensor:
        """The sum of what two experts give, weighed."""
        weights, chosen = chances.flatten(0, 1).topk(CHOICES, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        out, mask = torch.zeros_like(x), F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        for k, expert in enumerate(self.experts):
            choice, rows = torch.where(mask[k])
            out.index_add_(0, rows, expert(x[rows]) * weights[rows, choice, None])
        return out

    def hit(self, x: Tensor, chances: Tensor) -> Tensor:
        """The same, of the experts alone that have tokens."""
        weights, chosen = chances.flatten(0, 1).topk(CHOICES, -1)
        out, mask = torch.zeros_like(x), F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        for k in (mask.sum((-1, -2)) > 0).nonzero():
            choice, rows = torch.where(mask[k].squeeze(0))
            out.index_add_(0, rows, self.experts[k](x[rows]) * weights[rows, choice, None])
        return out

    def by_any_choice(self, x: Tensor, chances: Tensor) -> Tensor:
        """The same of all, with a mask of the tokens that have chosen an expert at all."""
        flat = chances.flatten(0, 1)
        chosen, out = flat.topk(CHOICES, -1).indices, torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            mask = (chosen == k).any(-1)
            out[mask] += expert(x[mask]) * flat[mask, k, None]
        return out

    def written(self, x: Tensor, chances: Tensor) -> Tensor:
        """What the best expert gives, written where its tokens are."""
        best, chosen = chances.flatten(0, 1).max(-1)
        out = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            mask = chosen == k
            out[mask] = expert(x[mask])
        return out * best[:, None]

    def within_capacity(self, x: Tensor, chances: Tensor) -> Tensor:
        """The same of tokens that come first in their text; the others are left as they are."""
        best, chosen = chances.max(-1)
        taken = F.one_hot(chosen, EXPERTS)
        taken = taken * (taken.cumsum(1) <= CAPACITY)
        out, taken = x.clone(), taken.flatten(0, 1)
        for k, expert in enumerate(self.experts):
            (rows,) = torch.where(taken[:, k])
            out.index_add_(0, rows, expert(x[rows]) * best.flatten()[rows, None])
        return out


class ExpertLoops(nn.Module):
    """A causal language model of two layers with such mixtures."""

    def __init__(self, kind: str, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(EVEN_VOCABULARY, HIDDEN)
        self.attention = nn.ModuleList(nn.Linear(HIDDEN, 3 * HIDDEN) for _ in range(layers))
        self.mixtures = nn.ModuleList(LoopedExperts(kind) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(layers))
        self.head = nn.Linear(HIDDEN, EVEN_VOCABULARY)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor
    ) -> dict[str, Tensor]:
        """The mean cross-entropy of the words that follow, and the logits."""
        x = self.embedding(input_ids)
        for attention, mixture, norm in zip(self.attention, self.mixtures, self.norms, strict=True):
            heads = attention(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(*heads, is_causal=True)
            x = x + y.transpose(1, 2).flatten(2)
            x = x + mixture(norm(x))
        logits = self.head(x)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


_BATCH = partial(causal_batch, EVEN_VOCABULARY)
EXPERT_LOOPS = {
    f"loop_{kind}": ModelCase(
        f"loop_{kind}", lambda _, kind=kind: ExpertLoops(kind), _BATCH, shifted
    )
    for kind in ("index_add", "uneven", "masked_writes", "capacity", "hit", "normed")
}
