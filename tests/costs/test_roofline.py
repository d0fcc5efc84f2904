"""Seconds by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from merakc.costs.roofline import graph_seconds, link_seconds, node_seconds, pipelined
from merakc.ir.graph import Graph, Input, InputKind, Node, Ref, TensorSpec
from merakc.kernels.ops import WAIT
from merakc.machines.cluster import Cluster

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


def test_gathers_reach_their_share_of_the_links_rate() -> None:
    half = replace(CLUSTER, gather_share=0.5)
    for op, factor in (("all_reduce", 1), ("gather_to", 2), ("reduce_scatter", 2)):
        args = (Ref("x"), "tp", "sum") if op == "all_reduce" else (Ref("x"), "tp", 0, (100,), 0)
        one = Node("y", f"merakc.{op}.default", args, (), (SQUARE,))
        whole_s, shared_s = (link_seconds(one, SPECS, c) - 0.25 for c in (CLUSTER, half))
        assert shared_s == pytest.approx(factor * whole_s), op


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


# Products in symmetric memory: 4 ranks with 25 of 100 rows, 100 columns.
PART, WEIGHT = TensorSpec((25, 100), torch.float32), TensorSpec((100, 100), torch.float32)
PLACE = (False, "tp", 0, (25,) * 4, 0)
GATHERED = Node("y", "merakc.gather_matmul.default", (Ref("x"), (Ref("v"), Ref("w")), *PLACE), (),
                (SQUARE,) * 3)  # fmt: skip
SCATTERED = Node("y", "merakc.matmul_scatter.default", (Ref("x"), Ref("v"), *PLACE), (), (PART,))
WEIGHTS = {Ref("v"): WEIGHT, Ref("w"): WEIGHT}
PARTS = {GATHERED.op: {Ref("x"): PART, **WEIGHTS}, SCATTERED.op: {Ref("x"): SQUARE, **WEIGHTS}}
# The link's bytes take 40 s, whichever way.
WIRE_S, CALL_S, STEP_S = 40.0, 1e-3, 0.25


@pytest.mark.parametrize(("one", "product_s"), [(GATHERED, 4.0), (SCATTERED, 2.0)])
def test_without_symmetric_memory_a_product_follows_its_collective(
    one: Node, product_s: float
) -> None:
    found = pipelined(one, PARTS[one.op], CLUSTER)
    assert found.exposed_s == found.wire_s == pytest.approx(STEP_S + WIRE_S)
    assert found.seconds == pytest.approx(product_s + CALL_S + STEP_S + WIRE_S)
    assert node_seconds(one, PARTS[one.op], CLUSTER) == found.seconds
    assert link_seconds(one, PARTS[one.op], CLUSTER) == 0


@pytest.mark.parametrize(("one", "product_s"), [(GATHERED, 4.0), (SCATTERED, 2.0)])
def test_in_symmetric_memory_the_longer_hides_the_shorter(one: Node, product_s: float) -> None:
    specs = PARTS[one.op]
    slow = replace(CLUSTER, symmetric_memory=True, bytes_per_s=1e9)
    product_s += 4 * CALL_S
    found = pipelined(one, specs, slow)
    assert found.wire_s == pytest.approx(4 * STEP_S + WIRE_S)
    assert found.seconds == pytest.approx(4 * STEP_S + WIRE_S + product_s / 4)
    assert found.hidden_s == pytest.approx(product_s * 3 / 4)
    fast = pipelined(one, specs, replace(slow, link_bytes_per_s=1e6, link_latency_s=0.0))
    assert fast.wire_s == pytest.approx(0.04)
    assert fast.seconds == pytest.approx(product_s + 0.01)
    assert (fast.exposed_s, fast.hidden_s) == (pytest.approx(0.01), pytest.approx(0.03))


def test_every_part_reads_the_weights() -> None:
    slow = replace(CLUSTER, symmetric_memory=True, bytes_per_s=1e3, link_latency_s=0.0)
    found = pipelined(SCATTERED, PARTS[SCATTERED.op], slow)
    moved_s = 40 + 4 * 40 + 40  # what is multiplied, the weight four times, the product
    assert found.seconds == pytest.approx(moved_s + 4 * CALL_S + WIRE_S / 4)


def test_parts_that_are_not_consecutive_are_put_in_order() -> None:
    slow = replace(CLUSTER, symmetric_memory=True, flops_per_s=1e12, link_bytes_per_s=1e15)
    whole, part = TensorSpec((2, 100, 100), torch.float32), TensorSpec((2, 25, 100), torch.float32)
    times = []
    for dim, shapes in ((0, (PART, SQUARE)), (1, (part, whole))):
        place = (False, "tp", dim, (25,) * 4, 0)
        node = replace(SCATTERED, args=(Ref("x"), Ref("v"), *place), outputs=(shapes[0],))
        times.append(pipelined(node, {**WEIGHTS, Ref("x"): shapes[1]}, slow).seconds)
    more_bytes = 40_000 + 40_000  # of two samples: what is multiplied, and the product
    copied_bytes = 2 * (80_000 + 20_000)
    assert times[1] - times[0] == pytest.approx((more_bytes + copied_bytes) / 1e5, rel=1e-3)


def test_a_product_and_its_collective_wait_for_the_link() -> None:
    x = Input("x", InputKind.ACTIVATION, PART)
    weights = [Input(name, InputKind.PARAMETER, WEIGHT) for name in "vw"]
    own_s = node_seconds(GATHERED, PARTS[GATHERED.op], CLUSTER)
    before = Node("s", "start.all_reduce", (Ref("x"), "tp", "sum"), (), (PART,))
    sum_s = link_seconds(before, {Ref("x"): PART}, CLUSTER)
    graph = Graph((x, *weights), (before, GATHERED), ())
    assert graph_seconds(graph, CLUSTER) == pytest.approx(CALL_S + sum_s + own_s)
    assert graph_seconds(replace(graph, nodes=(GATHERED,)), CLUSTER) == pytest.approx(own_s)
