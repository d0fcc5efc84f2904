"""Ranks that exchange parts of sequences for heads train as one process does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import merakc
from benchmarks.ranks import run_ranks
from merakc.kernels import collectives
from merakc.machines.cluster import NOMINAL_CPU
from merakc.passes.sharding.sequences import heads, rings

WIDTH, WORDS = 24, 11
HEADS, SHARED = (8, 4, 4, 4), (2, 4, 4, 4)  # of queries and of keys


class Attends(nn.Module):
    """Four attentions: causal, of 8 heads, of which 4 share one of keys; of 4 heads with dropout,
    spelled out; with a bias for each head and distance, trained; and to another sequence, with
    slopes of heads.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.queries = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in HEADS)
        shared = [WIDTH // n * k for n, k in zip(HEADS, SHARED, strict=True)]
        self.keys = nn.ModuleList(nn.Linear(WIDTH, n) for n in shared)
        self.values = nn.ModuleList(nn.Linear(WIDTH, n) for n in shared)
        self.mixes = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in HEADS)
        self.bias = nn.Embedding(16, 4)
        self.register_buffer("slopes", 0.5 ** torch.arange(4.0)[:, None, None])
        self.double()

    def parts(self, k: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[b, h, s, d] each; grouped keys and values are repeated."""
        every, each = (self.queries[k](x), self.keys[k](y), self.values[k](y)), WIDTH // HEADS[k]
        query, *others = (z.view(*z.shape[:2], -1, each).transpose(1, 2) for z in every)
        key, value = (z.repeat_interleave(HEADS[k] // SHARED[k], 1) for z in others)
        return query, key, value

    def mix(self, k: int, out: Tensor) -> Tensor:
        """The heads' results, joined."""
        return self.mixes[k](out.transpose(1, 2).flatten(2))

    def forward(self, ids: Tensor, other: Tensor) -> Tensor:
        x, y = self.words(ids), self.words(other)
        x = x + self.mix(0, F.scaled_dot_product_attention(*self.parts(0, x, x), is_causal=True))
        mixed = F.scaled_dot_product_attention(*self.parts(1, x, x), dropout_p=0.25)
        x = x + self.mix(1, mixed)
        query, key, value = self.parts(2, x, x)
        steps = torch.arange(ids.shape[1], device=ids.device)
        far = (steps[:, None] - steps).abs().clamp(max=15)
        scores = query @ key.transpose(2, 3) + self.bias(far).permute(2, 0, 1)
        x = x + self.mix(2, scores.softmax(-1) @ value)
        apart = (steps[:, None] - torch.arange(other.shape[1], device=ids.device)).abs()
        mask = -apart * self.slopes
        x = x + self.mix(3, F.scaled_dot_product_attention(*self.parts(3, x, y), mask[None]))
        return F.cross_entropy(self.out(x).flatten(0, 1), ids.flatten(), reduction="sum") / 10


Found = tuple[list[float], dict[str, Tensor], int]


def _train(layout: dict[str, Any], price: float, lengths: list[tuple[int, int]]) -> Found:
    """Losses, weights behind the steps, and how many exchanges there were."""
    heads.EXCHANGE_PRICE, rings.RING_PRICE = price, 1e9
    draw = torch.Generator().manual_seed(1)
    batches = [tuple(torch.randint(WORDS, (2, n), generator=draw) for n in s) for s in lengths]
    layout = {"dp": 1, "pp": 1, "micro_batches": 1, **layout}
    model: Any = merakc.auto_parallel(Attends(), batches[0], cluster=NOMINAL_CPU, **layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses, sent = [], list[str]()

    def noted(op: str, axis: str, size_bytes: int, issue: Callable[[], Any]) -> Any:
        sent.append(op)
        return issue()

    for batch in batches:
        with collectives.watched(noted):
            loss = model(*batch)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.full_state_dict(), sent.count("all_to_all")


# Lengths that divide and do not, one too short to be shared, and a batch as before.
LENGTHS = [(8, 6), (7, 9), (1, 1), (8, 6)]


@pytest.mark.parametrize(
    "layout",
    [{"cp": 2}, {"cp": 3}, {"cp": 4}, {"cp": 2, "pp": 2}, {"cp": 2, "tp": 2},
     {"cp": 2, "micro_batches": 2, "recompute": "full"},
     {"cp": 2, "tp": 2, "recompute": "selective", "overlap": 2},
     {"cp": 2, "pp": 2, "micro_batches": 2, "schedule": "zb-h1"}],
    ids=str,
)  # fmt: skip
def test_training_equals_one_process(layout: dict[str, Any]) -> None:
    """Of 4 heads over 3 ranks, of 2 grouped heads over 4, and of heads that tp has as well."""
    one = {"micro_batches": layout.get("micro_batches", 1)}
    ((losses, weights, _),) = run_ranks(1, partial(_train, one, 1.0, LENGTHS))
    ranks = layout.get("cp", 1) * layout.get("pp", 1) * layout.get("tp", 1)
    every = run_ranks(ranks, partial(_train, layout, 1e-3, LENGTHS))
    for found, _, exchanges in every:
        assert found == pytest.approx(losses, rel=1e-12)
        assert exchanges > 0
    for name, value in weights.items():
        torch.testing.assert_close(every[0][1][name], value, rtol=1e-10, atol=1e-12)
