"""To which attentions keys and values are passed around, by what they cost and what is known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from merakc.costs.work.flops import node_flops
from merakc.frontend.record import record
from merakc.ir.graph import Graph
from merakc.passes.forward.constant_masks import with_known_masks
from merakc.passes.sharding.layouts import RingSplit
from merakc.passes.sharding.sequences import rings
from merakc.passes.sharding.shard import shard

WORDS, WIDTH, HEADS = 32, 1024, 8


class Attends(nn.Module):
    """One attention of `shared` heads of keys for 8 of queries, of some kind."""

    def __init__(self, kind: str = "causal", shared: int = HEADS) -> None:
        super().__init__()
        self.shared, self.kind = shared, kind
        self.words, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.query, self.mix = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = (nn.Linear(WIDTH, shared * WIDTH // HEADS) for _ in range(2))

    def mask(self, seen: Tensor) -> Tensor | None:
        """By the kind: a window of two blocks of twelve, padding hidden, or floats."""
        length = seen.shape[1]
        rows, columns = torch.arange(length)[:, None], torch.arange(length)
        window = (columns <= rows) & (columns > rows - length // 4)
        kinds = {
            "window": window,
            "both ways": (columns > rows - 2) & (columns < rows + 2),
            "padded": (columns <= rows) & seen[:, None, None],
            "padded window": window & seen[:, None, None],
            "padding": seen[:, None, None],
            "floats": -(columns - rows).abs().float(),
        }
        return kinds.get(self.kind)

    def forward(self, ids: Tensor, seen: Tensor) -> Tensor:
        x = self.words(ids)
        other = x[:, : x.shape[1] // 2] if self.kind == "others" else x
        every = self.query(x), self.key(other), self.value(other)
        if self.kind == "halves":  # of each row, all first ones before all others
            every = tuple(y.unflatten(2, (2, -1)).transpose(1, 2).flatten(1, 2) for y in every)
        parts = [y.view(*y.shape[:2], -1, WIDTH // HEADS).transpose(1, 2) for y in every]
        times = HEADS // self.shared
        parts[1:] = [y[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2) for y in parts[1:]]
        dropout = 0.5 if self.kind == "dropout" else 0.0
        mixed = F.scaled_dot_product_attention(
            *parts, self.mask(seen), is_causal=self.kind in ("causal", "dropout"), dropout_p=dropout
        )
        mixed = mixed.transpose(1, 2).flatten(2)
        if self.kind == "halves":
            mixed = mixed.unflatten(1, (2, -1)).transpose(1, 2).flatten(2)
        x = x + self.mix(mixed)
        return F.cross_entropy(self.out(x).flatten(0, 1), ids.flatten(), reduction="sum")


def _graph(kind: str = "causal", length: int = 48, shared: int = HEADS) -> Graph:
    ids = torch.zeros(1, length, dtype=torch.long)
    return with_known_masks(record(Attends(kind, shared), (ids, ids > 0), {}).graph)


def _ring(graph: Graph, cp: int, tp: int = 1) -> RingSplit | None:
    context = shard(graph, tp, cp=cp).context
    assert context is not None
    found = [ring for split in context.sequences for ring in split.rings.values()]
    assert len(found) == len([*shard(graph, tp, cp=cp).rings(graph)])
    return found[0] if found else None


@pytest.mark.parametrize(
    ("kind", "hops", "swapped", "causal"),
    [
        ("causal", (0, 1, 2, 3), True, True),
        ("plain", (0, 1, 2, 3), False, False),
        ("padded", (0, 1, 2, 3), True, True),
        ("padding", (0, 1, 2, 3), False, False),
        ("window", (0, 1), False, True),
        ("padded window", (0, 1), False, True),
        ("both ways", (0, 1, 3), False, False),
    ],
)
def test_blocks_go_where_somebody_attends_to_them(
    kind: str, hops: tuple[int, ...], swapped: bool, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rings, "RING_PRICE", 1e-9)
    assert _ring(_graph(kind), 4) == RingSplit(hops, swapped, causal)


@pytest.mark.parametrize("kind", ["floats", "others", "halves", "dropout"])
def test_what_is_not_shown_is_left(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores that are added up, keys of other rows, rows of several blocks, draws."""
    monkeypatch.setattr(rings, "RING_PRICE", 1e-9)
    assert _ring(_graph(kind), 4) is None


@pytest.mark.parametrize(
    ("kind", "shared", "ranks", "length", "passed"),
    [
        ("causal", 8, 16, 1 << 10, False),  # products of a block are shorter than what is launched
        ("causal", 8, 16, 1 << 17, True),  # heads do not suffice
        ("causal", 2, 16, 1 << 17, True),
        ("causal", 8, 4, 1 << 14, False),  # they do: fewer calls, and no end that stands out
        ("plain", 8, 16, 1 << 17, True),
        ("window", 8, 4, 1 << 13, True),  # a block of three is all that is sent
    ],
)
def test_keys_are_passed_around_where_that_costs_least(
    kind: str, shared: int, ranks: int, length: int, passed: bool
) -> None:
    assert (_ring(_graph(kind, length, shared), ranks) is not None) is passed


def test_a_ring_is_as_good_for_each_rank_of_tp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rings, "RING_PRICE", 1e-9)
    assert _ring(_graph(), 2, 2) == _ring(_graph(), 2)


def test_ranks_of_swapped_rows_share_the_work_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a stage's share of it is told before its graph is written."""
    monkeypatch.setattr(rings, "RING_PRICE", 1e-9)
    graph = _graph()
    sharding, specs = shard(graph, 1, cp=4), graph.specs()
    (node,) = sharding.rings(graph)
    seen = sharding.node_specs(node, specs, 0)
    assert [seen[ref].shape[2] for ref in node.args[:3]] == [12, 48, 48]
    assert node_flops(sharding.evened(node), seen) == node_flops(node, specs) / 4
    other = graph.nodes[0]
    assert sharding.evened(other) is other
