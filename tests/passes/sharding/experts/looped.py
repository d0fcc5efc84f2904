"""A mixture whose experts run in a loop, in the forms that people write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from merakc.frontend.record import record
from merakc.ir.graph import Graph

B, S, H, WORDS, EXPERTS, COPIES = 2, 6, 4, 16, 5, 2
Form = Callable[["Looped", Tensor, Tensor], Tensor]


class Expert(nn.Module):
    """Two linear layers with something `between` them."""

    def __init__(self, between: Callable[[Tensor], Tensor] = F.silu) -> None:
        super().__init__()
        self.up, self.down, self.between = nn.Linear(H, 2 * H), nn.Linear(2 * H, H), between

    def forward(self, x: Tensor) -> Tensor:
        """`[rows, H]` to `[rows, H]`."""
        out: Tensor = self.down(self.between(self.up(x)))
        return out


class Normed(Expert):
    """The same between a norm, a shift of all rows and a scale, of each expert's own."""

    def __init__(self, between: Callable[[Tensor], Tensor] = F.silu) -> None:
        super().__init__(between)
        self.norm, self.root = nn.LayerNorm(H), nn.RMSNorm(H, eps=1e-5)
        self.scale, self.shift = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """`[rows, H]` to `[rows, H]`."""
        x = self.norm(x) + self.shift
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.root(super().forward(x)) * self.scale


class Looped(nn.Module):
    """Words, a loop over experts as the `form` says, and a loss, a sum over tokens."""

    def __init__(
        self, form: Form, between: Callable[[Tensor], Tensor] = F.silu, kind: type[Expert] = Expert
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.out = nn.Embedding(WORDS, H), nn.Linear(H, WORDS)
        self.router, self.attend = nn.Linear(H, EXPERTS), nn.Linear(H, 3 * H)
        self.experts = nn.ModuleList(kind(between) for _ in range(EXPERTS))
        self.form = form

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        x = self.words(ids)
        q, k, v = self.attend(x)[:, None].chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]
        flat = x.reshape(-1, H)
        x = x + self.form(self, flat, self.router(flat).softmax(-1)).view(x.shape)
        return F.cross_entropy(self.out(x).flatten(0, 1), labels.flatten(), reduction="sum")


def added(m: Looped, x: Tensor, chances: Tensor) -> Tensor:
    """`index_add_`, by parts of a one-hot mask."""
    weights, chosen = chances.topk(COPIES, -1)
    out, mask = torch.zeros_like(x), F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    for k, expert in enumerate(m.experts):
        choice, rows = torch.where(mask[k])
        out.index_add_(0, rows, expert(x[rows]) * weights[rows, choice, None])
    return out


def compared(m: Looped, x: Tensor, chances: Tensor) -> Tensor:
    """`index_add_`, by comparisons."""
    weights, chosen = chances.topk(COPIES, -1)
    out = torch.zeros_like(x)
    for k, expert in enumerate(m.experts):
        rows, choice = torch.where(chosen == k)
        out.index_add_(0, rows, expert(x[rows]) * weights[rows, choice].unsqueeze(-1))
    return out


def summed(m: Looped, x: Tensor, chances: Tensor) -> Tensor:
    """`out[rows] += ...`."""
    weights, chosen = chances.topk(COPIES, -1)
    out = torch.zeros_like(x)
    for k, expert in enumerate(m.experts):
        rows, choice = torch.where(chosen == k)
        out[rows] += weights[rows, choice, None] * expert(x[rows])
    return out


def written(m: Looped, x: Tensor, chances: Tensor) -> Tensor:
    """`out[mask] = ...`, of one expert a row."""
    best, chosen = chances.max(-1)
    out = torch.zeros_like(x)
    for k, expert in enumerate(m.experts):
        mask = chosen == k
        out[mask] = expert(x[mask])
    return out * best[:, None]


def within_capacity(m: Looped, x: Tensor, chances: Tensor) -> Tensor:
    """Of the rows of an expert the first two; the others stay."""
    best, chosen = chances.max(-1)
    taken = F.one_hot(chosen, EXPERTS)
    taken = taken * (taken.view(B, S, EXPERTS).cumsum(1) <= 2).view(-1, EXPERTS)
    out = x.clone()
    for k, expert in enumerate(m.experts):
        rows = taken[:, k].nonzero().squeeze(1)
        out[rows] = expert(x[rows]) * best[rows, None]
    return out


def without_the_last(m: Looped, x: Tensor, chances: Tensor) -> Tensor:
    """Rows of the last expert have none."""
    chosen = chances.argmax(-1)
    out = torch.zeros_like(x)
    for k, expert in enumerate([*m.experts][:-1]):
        (rows,) = torch.where(chosen == k)
        out.index_add_(0, rows, expert(x[rows]))
    return out


def by_any_choice(m: Looped, x: Tensor, chances: Tensor) -> Tensor:
    """With a mask of the rows that have chosen an expert at all, and weights of its own."""
    chosen, out = chances.topk(COPIES, -1).indices, torch.zeros_like(x)
    for k, expert in enumerate(m.experts):
        mask = (chosen == k).any(-1)
        out[mask] += expert(x[mask]) * chances[mask, k, None]
    return out


def by_weights(m: Looped, x: Tensor, chances: Tensor) -> Tensor:
    """With the weights of each expert beside its mask."""
    weights, chosen = chances.topk(COPIES, -1)
    out = torch.zeros_like(x)
    for k, expert in enumerate(m.experts):
        (rows,) = torch.where((chosen == k).any(-1))
        own = (weights * (chosen == k)).sum(-1, keepdim=True)
        out.index_add_(0, rows, expert(x[rows]) * own[rows])
    return out


def hit(m: Looped, x: Tensor, chances: Tensor) -> Tensor:
    """Of the experts that have rows, as transformers has it."""
    weights, chosen = chances.topk(COPIES, -1)
    out, mask = torch.zeros_like(x), F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    for k in torch.greater(mask.sum((-1, -2)), 0).nonzero():
        choice, rows = torch.where(mask[k].squeeze(0))
        own = m.experts[k](x[None, rows].reshape(-1, H)) * weights[rows, choice, None]
        out.index_add_(0, rows, own)
    return out


FORMS: tuple[Form, ...] = (added, compared, summed, written, within_capacity, without_the_last,
                           by_any_choice, by_weights, hit)  # fmt: skip


def model_of(form: Form, **how: Any) -> Looped:
    """The model, in float64."""
    return Looped(form, **how).double()


def graph_of(form: Form, **how: Any) -> Graph:
    """Its graph, as it is recorded."""
    ids = torch.zeros(B, S, dtype=torch.long)
    return record(model_of(form, **how), (ids, ids), {}).graph
