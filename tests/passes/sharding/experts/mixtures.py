"""A mixture of experts in plain PyTorch, with parts that can be another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import merakc.kernels.experts  # noqa: F401  registers the ops
from merakc.frontend.record import record
from merakc.ir.graph import Graph
from merakc.passes.sharding.propagate import propagate
from merakc.passes.sharding.sequences.context import LIKE_LARGE, ContextProblem
from merakc.passes.sharding.shard import sharding_of

B, S, H, WORDS, EXPERTS, COPIES = 2, 6, 4, 16, 5, 2
Part = Callable[..., Tensor]


def ends_of(ids: Tensor) -> Tensor:
    """The ends of each expert's rows, of sorted numbers."""
    return torch.histc(ids.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0).int()


def inverse_of(order: Tensor) -> Tensor:
    """Where each row has gone."""
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return back


class Mixture(nn.Module):
    """Words, a mixture of two products an expert with something `between` them, and a loss."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.out = nn.Embedding(WORDS, H), nn.Linear(H, WORDS)
        self.router, self.attend = nn.Linear(H, EXPERTS), nn.Linear(H, 3 * H)
        self.up = nn.Parameter(torch.randn(EXPERTS, H, 2 * H))
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * H, H))
        self.bias = nn.Parameter(torch.randn(EXPERTS, 2 * H))
        self.parts = parts

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """The loss, a sum over tokens."""
        x = self.words(ids)
        q, k, v = self.attend(x)[:, None].chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]
        x = x + self.experts(x.reshape(-1, H)).view(x.shape)
        return F.cross_entropy(self.out(x).flatten(0, 1), labels.flatten(), reduction="sum")

    def experts(self, x: Tensor) -> Tensor:
        """What the experts of each token make of it, weighed and added up."""
        part, product = self.parts.get, torch.ops.merakc.grouped_mm
        chances, chosen = self.router(x).softmax(-1).topk(COPIES, -1)
        ids, order = part("numbers", lambda ids, _: ids)(chosen.reshape(-1), chances).sort()
        ends = part("ends", ends_of)(ids)
        rows = part("rows", lambda x, order: x[order // COPIES])(x, order)
        made = product(rows, part("up", lambda m: m.up)(self), ends)
        made = part("between", lambda m, made, ids: (made + m.bias[ids]).tanh())(self, made, ids)
        made = product(made, self.down, ends)
        made = part("behind", lambda made: made)(made) * chances.reshape(-1)[order][:, None]
        back = made[part("inverse", inverse_of)(order)]
        return back.view(-1, COPIES, H).sum(1) + part("beside", lambda m: 0.0)(self)


def graph_of(**parts: Any) -> Graph:
    """The graph of a mixture."""
    ids = torch.zeros(B, S, dtype=torch.long)
    return record(Mixture(**parts), (ids, ids), {}).graph


def problem_of(graph: Graph, ranks: int = 2) -> ContextProblem:
    """What may compute on parts of its sequences."""
    dims = propagate(graph)
    return ContextProblem(dims, sharding_of(dims, set(), ranks), LIKE_LARGE)
