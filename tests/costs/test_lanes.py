"""When in its graph a collective runs: by hand, and as long as the graph's seconds say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from merakc.costs.lanes import chunk_collectives, graph_collectives
from merakc.ir.graph import Graph, Input, InputKind, Node, Ref, TensorSpec
from merakc.ir.program import ActionKind, StageGraphs
from merakc.kernels.ops import WAIT
from merakc.machines.cluster import Cluster

# A negation takes 8 s, and so does a sum on the link; a call takes none.
SPEC = TensorSpec((100, 100), torch.float32)
CLUSTER = Cluster("test", 1e6, 1e4, 0.0, 1, 0.0, 1e4)
X = Input("x", InputKind.BATCH, SPEC)
NEG, SUM = "aten.neg.default", "merakc.all_reduce.default"


def node(name: str, op: str, *args: object) -> Node:
    return Node(name, op, args or (Ref("x"),), (), (SPEC,))


def start(name: str) -> Node:
    return node(name, "start.all_reduce", Ref("x"), "tp", "sum")


def times(*nodes: Node) -> list[list[float]]:
    """Start, end, start and end of the wait, of each collective; in seconds."""
    graph = Graph((X,), nodes, ())
    found = graph_collectives(graph, CLUSTER)
    assert {(c.op, c.axis, c.size_bytes) for c in found} == {("all_reduce", "tp", 40_000)}
    total_s = 8.0 * len(nodes)
    return [[s * total_s for s in (c.start, c.end, c.wait_start, c.wait_end)] for c in found]


def test_one_that_blocks_is_waited_for_all_along() -> None:
    blocking = node("s", SUM, Ref("x"), "tp", "sum")
    assert times(node("a", NEG), blocking) == [pytest.approx([8.0, 16.0, 8.0, 16.0])]


def test_one_that_is_started_runs_beside_what_follows() -> None:
    beside = start("s"), node("a", NEG), node("w", WAIT, Ref("s"))
    found = graph_collectives(Graph((X,), beside, ()), CLUSTER)
    assert [(c.start, c.end, c.wait_start, c.wait_end) for c in found] == [(0.0, 1.0, 1.0, 1.0)]


def test_one_that_has_ended_is_waited_for_no_longer() -> None:
    nodes = start("s"), node("a", NEG), node("b", NEG), node("w", WAIT, Ref("s"))
    (found,) = graph_collectives(Graph((X,), nodes, ()), CLUSTER)
    assert (found.end, found.wait_start, found.wait_end) == (0.5, 1.0, 1.0)


def test_the_second_waits_for_the_link() -> None:
    nodes = start("s"), start("t"), node("a", NEG), node("w", WAIT, Ref("t"))
    found = graph_collectives(Graph((X,), nodes, ()), CLUSTER)
    assert [(c.start, c.end, c.wait_start, c.wait_end) for c in found] == [
        (0.0, 0.5, 0.5, 0.5),  # nobody waits for it
        (0.0, 1.0, 0.5, 1.0),
    ]


@pytest.mark.parametrize("scatters", [False, True])
def test_of_one_beside_products_the_rank_waits_for_what_they_do_not_hide(scatters: bool) -> None:
    # Products of 5 s, and 8 s on the link, of 40,000 bytes, in two parts.
    wide, part = TensorSpec((100, 25), torch.float32), TensorSpec((50, 100), torch.float32)
    weight = TensorSpec((25, 100), torch.float32)
    place = (False, "tp", 0, (50, 50), 0)
    if scatters:
        x, op, outputs = wide, "merakc.matmul_scatter.default", (part,)
        args: tuple[object, ...] = (Ref("x"), Ref("w"), *place)
    else:
        x, weight, op = part, TensorSpec((100, 25), torch.float32), "merakc.gather_matmul.default"
        args, outputs = (Ref("x"), (Ref("w"),), *place), (SPEC, wide)
    cluster = replace(CLUSTER, flops_per_s=1e5, bytes_per_s=1e9, symmetric_memory=True)
    inputs = (Input("x", InputKind.BATCH, x), Input("w", InputKind.PARAMETER, weight))
    graph = Graph(inputs, (Node("y", op, args, (), outputs),), ())
    total_s = 8.0 + 5.0 / 2
    spans = [s / total_s for s in ((2.5, 10.5, 5.0, 10.5) if scatters else (0.0, 8.0, 0.0, 5.5))]
    (found,) = graph_collectives(graph, replace(cluster, link_bytes_per_s=5e3))
    assert (found.op, found.axis) == ("reduce_scatter" if scatters else "all_gather", "tp")
    assert found.size_bytes == 40_000
    assert [found.start, found.end, found.wait_start, found.wait_end] == pytest.approx(spans)


def test_a_chunk_has_those_of_each_of_its_graphs() -> None:
    one = Graph((X,), (node("s", SUM, Ref("x"), "tp", "sum"),), ())
    none = Graph((X,), (node("a", NEG),), ())
    found = chunk_collectives(3, StageGraphs(one, none, checkpoint=one), CLUSTER)
    assert {of: len(some) for of, some in found.items()} == {
        (3, ActionKind.FORWARD, False): 1,
        (3, ActionKind.FORWARD, True): 1,
        (3, ActionKind.BACKWARD, False): 0,
    }
