"""The nodes of a rank to which keys and values are passed around."""

from __future__ import annotations

import pytest

from merakc.costs.work.flops import node_flops
from merakc.ir.graph import Graph, Node
from merakc.kernels.ring.attention import RING
from merakc.kernels.ring.swap import SWAP
from merakc.passes.forward.grouped_heads import with_grouped_heads
from merakc.passes.sharding.sequences import rings
from merakc.passes.sharding.shard import shard
from merakc.passes.sharding.spmd import spmd_partition
from tests.passes.sharding.sequences.test_rings import HEADS, WIDTH, _graph


@pytest.fixture(autouse=True)
def _only_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rings, "RING_PRICE", 1e-9)


def _local(graph: Graph, cp: int, lane: int, tp: int = 1) -> tuple[Graph, Node]:
    local = spmd_partition(graph, shard(graph, tp, cp=cp), lane)
    local.verify()
    (node,) = (n for n in local.nodes if n.op == RING)
    return local, node


@pytest.mark.parametrize(("kind", "length"), [("causal", 12), ("causal", 14), ("padded", 14)])
def test_rows_are_swapped_before_and_behind(kind: str, length: int) -> None:
    graph = _graph(kind, length)
    (attention,) = (n for n in graph.nodes if "attention" in n.op)
    sizes = [length // 4 + (r < length % 4) for r in range(4)]
    for rank in range(4):
        local, node = _local(graph, 4, rank)
        swaps = [n for n in local.nodes if n.op == SWAP]
        assert len(swaps) == (4 if kind == "causal" else 5)  # queries, keys, values, masks, results
        swapped = sizes[rank] - sizes[rank] // 2 + sizes[3 - rank] // 2
        specs = local.specs()
        assert {specs[ref].shape[2] for ref in node.args[:3]} == {swapped}
        assert swaps[-1].name == attention.name
        assert swaps[-1].spec.shape[2] == sizes[rank]
        assert node.args[-4:] == (tuple(sizes), (0, 1, 2, 3), True, rank)
        if kind == "padded":
            assert specs[node.args[3]].shape[-2:] == (swapped, length)


def test_of_windows_no_rows_are_swapped() -> None:
    local, node = _local(_graph("window"), 4, 2)
    assert not any(n.op == SWAP or "gather" in n.op for n in local.nodes)
    assert node.args[4] is True
    assert node.args[-4:] == ((12,) * 4, (0, 1), False, 2)
    assert node_flops(node, local.specs()) == 4 * 12 * 24 * WIDTH  # of two blocks


def test_grouped_heads_are_swapped_before_they_are_repeated() -> None:
    graph = _graph(shared=2)
    local, _ = _local(graph, 2, 1)
    found = with_grouped_heads(local)
    found.verify()
    (node,) = (n for n in found.nodes if n.op == RING)
    specs = found.specs()
    assert [specs[ref].shape[1] for ref in node.args[:3]] == [HEADS, 2, 2]
    shared = [n.spec.shape[1] for n in found.nodes if n.op == SWAP]
    assert sorted(shared) == [2, 2, HEADS, HEADS]


def test_each_rank_of_tp_has_heads_of_its_own() -> None:
    for lane in range(4):
        _, node = _local(_graph("padded"), 2, lane, 2)
        assert node.spec.shape == (1, HEADS // 2, 24, WIDTH // HEADS)
        assert node.args[-5] == "cp"
        assert node.args[-1] == lane // 2
