"""Seconds by hand."""

from __future__ import annotations

import pytest
import torch

from merakc.cluster import Cluster
from merakc.costs.roofline import graph_seconds, link_seconds, node_seconds
from merakc.ir.graph import Graph, Input, InputKind, Node, Ref, TensorSpec
from merakc.kernels.ops import WAIT

CLUSTER = Cluster("test", flops_per_s=1e6, bytes_per_s=1e5, op_overhead_s=1e-3,
                  memory_bytes=1, link_latency_s=0.25, link_bytes_per_s=1e3)  # fmt: skip
SQUARE = TensorSpec((100, 100), torch.float32)
SPECS = {Ref("x"): SQUARE}


def node(op: str, *args: object) -> Node:
    return Node("y", op, args or (Ref("x"),), (), (SQUARE,))


def test_the_longer_of_arithmetic_and_traffic() -> None:
    product = node("aten.mm.default", Ref("x"), Ref("x"))
    assert node_seconds(product, SPECS, CLUSTER) == pytest.approx(2e6 / 1e6 + 1e-3)
    assert node_seconds(node("aten.neg.default"), SPECS, CLUSTER) == pytest.approx(0.8 + 1e-3)


def test_views_take_the_time_of_a_call_alone() -> None:
    assert node_seconds(node("aten.t.default"), SPECS, CLUSTER) == 1e-3


def test_collectives_take_the_links_time() -> None:
    reduced = node("merakc.all_reduce.default", Ref("x"), "tp", "sum")
    assert node_seconds(reduced, SPECS, CLUSTER) == pytest.approx(0.25 + 2 * 40)


def test_a_graph_takes_the_sum() -> None:
    neg = node("aten.neg.default")
    graph = Graph((Input("x", InputKind.BATCH, SQUARE),), (neg, node("aten.t.default")), ())
    assert graph_seconds(graph, CLUSTER) == pytest.approx(0.8 + 2e-3)


def started(name: str) -> Node:
    return Node(name, "start.all_reduce", (Ref("x"), "tp", "sum"), (), (SQUARE,))


def waited(name: str) -> Node:
    return Node(f"{name} done", WAIT, (Ref(name),), (), (SQUARE,))


def test_what_is_started_takes_the_link_and_not_the_device() -> None:
    assert node_seconds(started("a"), SPECS, CLUSTER) == 1e-3
    assert link_seconds(started("a"), SPECS, CLUSTER) == pytest.approx(0.25 + 2 * 40)
    assert link_seconds(node("aten.neg.default"), SPECS, CLUSTER) == 0


def test_computing_hides_what_is_started_until_it_is_waited_for() -> None:
    x = Input("x", InputKind.BATCH, SQUARE)
    negs = [Node(f"n{k}", "aten.neg.default", (Ref("x"),), (), (SQUARE,)) for k in range(200)]
    a, b, ready = started("a"), started("b"), waited("a")
    sum_s, neg_s, call_s = 80.25, 0.801, 1e-3
    one = Graph((x,), (a, *negs[:10], ready), ())
    assert graph_seconds(one, CLUSTER) == pytest.approx(call_s + sum_s + call_s)
    hidden = Graph((x,), (a, *negs, ready), ())
    assert graph_seconds(hidden, CLUSTER) == pytest.approx(2 * call_s + 200 * neg_s)
    two = Graph((x,), (a, b, ready, waited("b")), ())  # one after the other
    assert graph_seconds(two, CLUSTER) == pytest.approx(call_s + 2 * sum_s + call_s, abs=2e-3)
    blocking = Graph((x,), (a, node("merakc.all_reduce.default", Ref("x"), "tp", "sum")), ())
    assert graph_seconds(blocking, CLUSTER) == pytest.approx(call_s + 2 * sum_s)
