"""Which attentions exchange parts of sequences for heads, by what they cost."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from merakc.frontend.record import record
from merakc.ir.graph import Graph, Ref
from merakc.passes.sharding.sequences import heads, rings
from merakc.passes.sharding.shard import shard
from merakc.passes.sharding.spmd import spmd_partition

WORDS, WIDTH = 32, 32


@pytest.fixture(autouse=True)
def _no_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the two other forms."""
    monkeypatch.setattr(rings, "RING_PRICE", 1e9)


class Attends(nn.Module):
    """One attention of `shared` heads of keys for 8 of queries, causal, masked or neither."""

    def __init__(self, shared: int = 8, kind: str = "causal", count: int = 8) -> None:
        super().__init__()
        self.shared, self.kind, self.count = shared, kind, count
        self.words, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        each = WIDTH // count
        self.query, self.mix = nn.Linear(WIDTH, count * each), nn.Linear(count * each, WIDTH)
        self.key, self.value = (nn.Linear(WIDTH, shared * each) for _ in range(2))

    def forward(self, ids: Tensor, seen: Tensor) -> Tensor:
        x, length = self.words(ids), ids.shape[1]
        every = self.query(x), self.key(x), self.value(x)
        parts = [y.view(*ids.shape, -1, WIDTH // self.count).transpose(1, 2) for y in every]
        times = self.count // self.shared
        parts[1:] = [y[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2) for y in parts[1:]]
        mask = None
        if self.kind == "masked":
            steps = torch.arange(length)
            mask = ((steps[:, None] - steps).abs() < 3)[None, None] & seen[:, None, None]
        mixed = F.scaled_dot_product_attention(*parts, mask, is_causal=self.kind == "causal")
        x = x + self.mix(mixed.transpose(1, 2).flatten(2))
        return F.cross_entropy(self.out(x).flatten(0, 1), ids.flatten(), reduction="sum")


def _graph(model: nn.Module, length: int = 12) -> Graph:
    ids = torch.zeros(1, length, dtype=torch.long)
    return record(model, (ids, ids > 0), {}).graph


def _counts(graph: Graph, cp: int, tp: int = 1) -> list[Counter[str]]:
    """How often each lane has which collective."""
    sharding = shard(graph, tp, cp=cp)
    found = []
    for lane in range(cp * tp):
        local = spmd_partition(graph, sharding, lane)
        local.verify()
        ops = (n.op.split(".")[1] for n in local.nodes if n.op.startswith("merakc."))
        found.append(Counter(ops))
    return found


def _exchanges(graph: Graph, cp: int, tp: int = 1) -> bool:
    (count,) = {own["exchange"] for own in _counts(graph, cp, tp)}
    return count > 0


def test_queries_keys_values_and_results_are_exchanged_and_nothing_gathered() -> None:
    graph = _graph(Attends())
    for own in _counts(graph, 2):
        assert own["exchange"] == 4
        assert own["gather_to"] == own["all_gather"] == 0
    (node,) = shard(graph, 1, cp=2).exchanged(graph)
    assert node.op == "merakc.attention.default"
    attention = (n for n in spmd_partition(graph, shard(graph, 1, cp=2), 1).nodes)
    (local,) = (n for n in attention if n.op == "merakc.attention.default")
    assert local.spec.shape == (1, 4, 12, WIDTH // 8)
    assert len(local.args) == 6  # from the first row on


@pytest.mark.parametrize(
    ("shared", "kind", "ranks", "length", "exchanged"),
    [
        (8, "plain", 2, 4096, False),  # of two ranks both move as much
        (8, "plain", 4, 4096, True),
        (8, "causal", 2, 4096, True),  # and the last rows have more to attend to
        (2, "plain", 2, 4096, False),  # a quarter of keys and values
        (2, "causal", 2, 256, False),
        (2, "causal", 2, 1 << 14, True),
        (2, "causal", 4, 1 << 14, True),  # the queries of each group, and all keys
        (1, "causal", 4, 1 << 14, True),
    ],
)
def test_heads_are_exchanged_where_that_costs_less(
    shared: int, kind: str, ranks: int, length: int, exchanged: bool
) -> None:
    assert _exchanges(_graph(Attends(shared, kind), length), ranks) is exchanged


def test_grouped_heads_are_sent_before_they_are_repeated() -> None:
    graph = _graph(Attends(4), 1 << 14)
    sharding = shard(graph, 1, cp=2)
    local = spmd_partition(graph, sharding, 0)
    sizes = sorted(n.spec.shape[1] for n in local.nodes if "exchange" in n.op)
    assert sizes == [2, 2, 4, 8]  # keys and values, queries, and results on their way back


def test_of_fewer_heads_of_keys_than_ranks_the_queries_of_each_group_are_exchanged() -> None:
    graph = _graph(Attends(2), 1 << 14)
    for rank in range(4):
        local = spmd_partition(graph, shard(graph, 1, cp=4), rank)
        (attention,) = (n for n in local.nodes if n.op == "merakc.attention.default")
        assert attention.spec.shape[1:3] == (2, 1 << 14)  # one of each group


def test_heads_that_do_not_suffice_stay_gathered() -> None:
    assert not _exchanges(_graph(Attends(2, count=2)), 4)


def test_uneven_heads_cost_what_the_slowest_rank_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = _graph(Attends(kind="plain"), 1 << 14)
    assert _exchanges(graph, 4)
    assert not _exchanges(graph, 5)  # one rank would have 2 of 8, not 1.6
    monkeypatch.setattr(heads, "PASSES", 0)
    assert _exchanges(graph, 5)


def test_ranks_of_tp_have_heads_of_their_own_to_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "EXCHANGE_PRICE", 1e-3)
    graph = _graph(Attends())
    for lane, own in enumerate(_counts(graph, 2, 2)):
        assert own["exchange"] == 4
        local = spmd_partition(graph, shard(graph, 2, cp=2), lane)
        (attention,) = (n for n in local.nodes if n.op == "merakc.attention.default")
        assert attention.spec.shape[1:3] == (2, 12)
    assert not _exchanges(_graph(Attends(2, count=2)), 2, 2)  # one head for each rank of tp


def test_masks_of_exchanged_attentions_are_made_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "EXCHANGE_PRICE", 1e-3)
    graph = _graph(Attends(kind="masked"))
    sharding = shard(graph, 1, cp=2)
    for own in _counts(graph, 2):
        assert own["exchange"] == 4
        assert own["all_gather"] == own["gather_to"] == 0
    assert sharding.context is not None
    inside = set(chain.from_iterable(s.nodes for s in sharding.context.sequences))
    masks = {n.name for n in graph.nodes if Ref(n.name) not in graph.grad_values()}
    assert masks.isdisjoint(inside)
