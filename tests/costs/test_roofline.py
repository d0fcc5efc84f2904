"""Seconds by hand."""

from __future__ import annotations

import pytest
import torch

from merakc.cluster import Cluster
from merakc.costs.roofline import graph_seconds, node_seconds
from merakc.ir.graph import Graph, Input, InputKind, Node, Ref, TensorSpec

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
