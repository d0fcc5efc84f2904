"""Seconds of nodes and graphs by hand, and when in its graph a collective runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.models import MODELS
from merakc.analysis.aliases import equal_values
from merakc.costs.device import LEAST_S, Place, forward_seconds, launched, place_on
from merakc.costs.fabric import Fabric
from merakc.costs.nodes import (
    chunk_collectives,
    divided_seconds,
    graph_collectives,
    graph_seconds,
    link_seconds,
    node_seconds,
    pipelined,
)
from merakc.costs.work.kernels import graph_work
from merakc.ir.graph import Graph, Input, InputKind, Node, Ref, TensorSpec
from merakc.ir.program import ActionKind, Mesh, StageGraphs
from merakc.ir.strategy import Strategy
from merakc.kernels.ops import WAIT
from merakc.lowering.lowered import make_plan
from merakc.machines.cluster import NOMINAL_CPU, Cluster
from tests.recorded import one_of_several

CLUSTER = Cluster("test", flops_per_s=1e6, bytes_per_s=1e5, op_overhead_s=1e-3,
                  memory_bytes=1, link_latency_s=0.25, link_bytes_per_s=1e3)  # fmt: skip
# A product takes 2 s, a negation 0.8 s and a sum on the link 40.5 s: two steps, 40,000 bytes.
PLACE = place_on(CLUSTER, 2)
CALL_S, NEG_S, SUM_S = 1e-3, 0.8 + LEAST_S, 40.5
SQUARE = TensorSpec((100, 100), torch.float32)
SPECS = {Ref("x"): SQUARE}
X = Input("x", InputKind.BATCH, SQUARE)
NEG, SUM = "aten.neg.default", "merakc.all_reduce.default"


def node(op: str, *args: object, name: str = "y") -> Node:
    return Node(name, op, args or (Ref("x"),), (), (SQUARE,))


def summed(name: str = "y") -> Node:
    return node(SUM, Ref("x"), "tp", "sum", name=name)


def started(name: str) -> Node:
    return node("start.all_reduce", Ref("x"), "tp", "sum", name=name)


def waited(name: str) -> Node:
    return node(WAIT, Ref(name), name=f"{name} done")


def seconds(*nodes: Node) -> float:
    return graph_seconds(Graph((X,), nodes, ()), PLACE)


def test_the_longer_of_arithmetic_and_traffic() -> None:
    product = node("aten.mm.default", Ref("x"), Ref("x"))
    assert node_seconds(product, SPECS, PLACE) == pytest.approx(2.0)
    assert node_seconds(node(NEG), SPECS, PLACE) == pytest.approx(NEG_S, rel=1e-9)


def test_what_is_small_takes_the_time_of_its_launch() -> None:
    slow = place_on(replace(CLUSTER, op_overhead_s=3.0), 2)
    assert node_seconds(node(NEG), SPECS, slow) == launched(NEG_S, 3.0) > 3.0
    assert divided_seconds(node(NEG), SPECS, slow) == pytest.approx(0.8, rel=1e-9)


def test_views_take_no_time() -> None:
    assert node_seconds(node("aten.t.default"), SPECS, PLACE) == 0


def test_collectives_take_the_links_time() -> None:
    assert node_seconds(summed(), SPECS, PLACE) == pytest.approx(SUM_S)
    assert link_seconds(node(NEG), SPECS, PLACE) == divided_seconds(summed(), SPECS, PLACE) == 0


def test_gathers_reach_their_share_of_the_links_rate() -> None:
    half = place_on(replace(CLUSTER, gather_share=0.5), 2)
    for op, factor in (("all_reduce", 1), ("gather_to", 2), ("reduce_scatter", 2)):
        args = (Ref("x"), "tp", "sum") if op == "all_reduce" else (Ref("x"), "tp", 0, (100,), 0)
        one, steps_s = node(f"merakc.{op}.default", *args), 0.5 if op == "all_reduce" else 0.25
        whole_s, shared_s = (link_seconds(one, SPECS, at) - steps_s for at in (PLACE, half))
        assert shared_s == pytest.approx(factor * whole_s), op


def test_a_graph_takes_the_sum() -> None:
    assert seconds(node(NEG), node("aten.t.default")) == pytest.approx(NEG_S)
    assert seconds(summed("a"), summed("b")) == pytest.approx(2 * SUM_S)
    slower = graph_seconds(Graph((X,), (node(NEG), summed("a")), ()), PLACE, 3.0)
    assert slower == pytest.approx(3 * NEG_S + SUM_S)


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_a_graph_takes_what_its_kernels_do(name: str) -> None:
    case = MODELS[name]
    recording = one_of_several(case.model(), case.batch(2))
    lowered = make_plan(recording, Strategy().on(Mesh(tp=2), micro_batches=4), NOMINAL_CPU)
    local, place = lowered.stages.local[0], place_on(NOMINAL_CPU, 2)
    told = forward_seconds(graph_work(local), place)
    once = local.renamed(equal_values(local)).pruned()  # equal calls are made once
    assert graph_seconds(once, place) == pytest.approx(told, rel=1e-9)


def test_what_is_started_takes_the_link_and_not_the_device() -> None:
    assert node_seconds(started("a"), SPECS, PLACE) == CALL_S
    assert link_seconds(started("a"), SPECS, PLACE) == pytest.approx(SUM_S)


def test_computing_hides_what_is_started_until_it_is_waited_for() -> None:
    negs = [node(NEG, name=f"n{k}") for k in range(200)]
    a, b, ready = started("a"), started("b"), waited("a")
    assert seconds(a, *negs[:10], ready) == pytest.approx(SUM_S)
    assert seconds(a, *negs, ready) == pytest.approx(200 * NEG_S)
    assert seconds(a, b, ready, waited("b")) == pytest.approx(2 * SUM_S)  # one after the other
    assert seconds(a, summed()) == pytest.approx(2 * SUM_S)


# Products in symmetric memory: 4 ranks with 25 of 100 rows, 100 columns.
PART, WEIGHT = TensorSpec((25, 100), torch.float32), TensorSpec((100, 100), torch.float32)
ROWS = (False, "tp", 0, (25,) * 4, 0)
GATHERED = Node("y", "merakc.gather_matmul.default", (Ref("x"), (Ref("v"), Ref("w")), *ROWS), (),
                (SQUARE,) * 3)  # fmt: skip
SCATTERED = Node("y", "merakc.matmul_scatter.default", (Ref("x"), Ref("v"), *ROWS), (), (PART,))
WEIGHTS = {Ref("v"): WEIGHT, Ref("w"): WEIGHT}
PARTS = {GATHERED.op: {Ref("x"): PART, **WEIGHTS}, SCATTERED.op: {Ref("x"): SQUARE, **WEIGHTS}}
# On the link, whichever way: three steps, and three quarters of 40,000 bytes.
WIRE_S = 3 * 0.25 + 30.0


def of_four(**changes: Any) -> Place:
    return place_on(replace(CLUSTER, **changes), 4)


@pytest.mark.parametrize(("one", "product_s"), [(GATHERED, 4.0), (SCATTERED, 2.0)])
def test_without_symmetric_memory_a_product_follows_its_collective(
    one: Node, product_s: float
) -> None:
    found = pipelined(one, PARTS[one.op], of_four())
    assert found.exposed_s == found.wire_s == pytest.approx(WIRE_S)
    assert found.seconds == pytest.approx(product_s + WIRE_S)
    assert node_seconds(one, PARTS[one.op], of_four()) == found.seconds


@pytest.mark.parametrize(("one", "product_s"), [(GATHERED, 4.0), (SCATTERED, 2.0)])
def test_in_symmetric_memory_the_longer_hides_the_shorter(one: Node, product_s: float) -> None:
    specs = PARTS[one.op]
    found = pipelined(one, specs, of_four(symmetric_memory=True, bytes_per_s=1e9))
    assert found.wire_s == pytest.approx(WIRE_S)
    assert found.seconds == pytest.approx(WIRE_S + product_s / 4)
    assert found.hidden_s == pytest.approx(product_s * 3 / 4)
    assert found.host_s == 4 * CALL_S
    fast = pipelined(one, specs, of_four(symmetric_memory=True, bytes_per_s=1e9,
                                         link_bytes_per_s=1e6, link_latency_s=0.0))  # fmt: skip
    assert fast.wire_s == pytest.approx(0.03)
    assert fast.seconds == pytest.approx(product_s + 0.0075)
    assert (fast.exposed_s, fast.hidden_s) == (pytest.approx(0.0075), pytest.approx(0.0225))


def test_every_part_reads_the_weights() -> None:
    slow = of_four(symmetric_memory=True, bytes_per_s=1e3, link_latency_s=0.0)
    found = pipelined(SCATTERED, PARTS[SCATTERED.op], slow)
    moved_s = 40 + 4 * 40 + 40  # what is multiplied, the weight four times, the product
    assert found.seconds == pytest.approx(moved_s + 30 / 4)


def test_parts_that_are_not_consecutive_are_put_in_order() -> None:
    slow = of_four(symmetric_memory=True, flops_per_s=1e12, link_bytes_per_s=1e15)
    whole, part = TensorSpec((2, 100, 100), torch.float32), TensorSpec((2, 25, 100), torch.float32)
    times = []
    for dim, shapes in ((0, (PART, SQUARE)), (1, (part, whole))):
        rows = (False, "tp", dim, (25,) * 4, 0)
        node = replace(SCATTERED, args=(Ref("x"), Ref("v"), *rows), outputs=(shapes[0],))
        times.append(pipelined(node, {**WEIGHTS, Ref("x"): shapes[1]}, slow).seconds)
    more_bytes = 40_000 + 40_000  # of two samples: what is multiplied, and the product
    copied_bytes = 2 * (80_000 + 20_000)
    assert times[1] - times[0] == pytest.approx((more_bytes + copied_bytes) / 1e5, rel=1e-3)


def test_a_product_and_its_collective_wait_for_the_link() -> None:
    x = Input("x", InputKind.ACTIVATION, PART)
    weights = [Input(name, InputKind.PARAMETER, WEIGHT) for name in "vw"]
    own_s = node_seconds(GATHERED, PARTS[GATHERED.op], of_four())
    before = Node("s", "start.all_reduce", (Ref("x"), "tp", "sum"), (), (PART,))
    sum_s = link_seconds(before, {Ref("x"): PART}, of_four())
    graph = Graph((x, *weights), (before, GATHERED), ())
    assert graph_seconds(graph, of_four()) == pytest.approx(sum_s + own_s)
    assert graph_seconds(replace(graph, nodes=(GATHERED,)), of_four()) == pytest.approx(own_s)


# --- when collectives run --------------------------------------------------------------------

# A sum takes 8 s on the link, and a negation as long; a call takes none.
EVEN = place_on(Cluster("test", 1e6, 1e4, 0.0, 1, 0.0, 5e3), 2)


def shares(*nodes: Node) -> list[list[float]]:
    """Start, end, start and end of the wait, of each collective: shares of the graph's seconds."""
    found = graph_collectives(Graph((X,), nodes, ()), EVEN)
    assert {(c.op, c.axis, c.size_bytes) for c in found} == {("all_reduce", "tp", 40_000)}
    return [pytest.approx([c.start, c.end, c.wait_start, c.wait_end], abs=1e-6) for c in found]


def test_one_that_blocks_is_waited_for_all_along() -> None:
    assert shares(node(NEG), summed("s")) == [[0.5, 1.0, 0.5, 1.0]]


def test_one_that_is_started_runs_beside_what_follows() -> None:
    assert shares(started("s"), node(NEG), waited("s")) == [[0.0, 1.0, 1.0, 1.0]]


def test_one_that_has_ended_is_waited_for_no_longer() -> None:
    nodes = started("s"), node(NEG, name="a"), node(NEG, name="b"), waited("s")
    assert shares(*nodes) == [[0.0, 0.5, 1.0, 1.0]]


def test_the_second_waits_for_the_link() -> None:
    assert shares(started("s"), started("t"), node(NEG), waited("t")) == [
        [0.0, 0.5, 0.5, 0.5],  # nobody waits for it
        [0.0, 1.0, 0.5, 1.0],
    ]


@pytest.mark.parametrize("scatters", [False, True])
def test_of_one_beside_products_the_rank_waits_for_what_they_do_not_hide(scatters: bool) -> None:
    # Products of 5 s, and 8 s on the link, of 40,000 bytes, in two parts.
    wide, part = TensorSpec((100, 25), torch.float32), TensorSpec((50, 100), torch.float32)
    weight = TensorSpec((25, 100), torch.float32)
    rows = (False, "tp", 0, (50, 50), 0)
    if scatters:
        x, op, outputs = wide, "merakc.matmul_scatter.default", (part,)
        args: tuple[object, ...] = (Ref("x"), Ref("w"), *rows)
    else:
        x, weight, op = part, TensorSpec((100, 25), torch.float32), "merakc.gather_matmul.default"
        args, outputs = (Ref("x"), (Ref("w"),), *rows), (SQUARE, wide)
    cluster = Cluster("test", 1e5, 1e9, 0.0, 1, 0.0, 2.5e3, symmetric_memory=True)
    inputs = (Input("x", InputKind.BATCH, x), Input("w", InputKind.PARAMETER, weight))
    graph = Graph(inputs, (Node("y", op, args, (), outputs),), ())
    total_s = 8.0 + 5.0 / 2
    spans = [s / total_s for s in ((2.5, 10.5, 5.0, 10.5) if scatters else (0.0, 8.0, 0.0, 5.5))]
    (found,) = graph_collectives(graph, place_on(cluster, 2))
    assert (found.op, found.axis) == ("reduce_scatter" if scatters else "all_gather", "tp")
    assert found.size_bytes == 40_000
    assert [found.start, found.end, found.wait_start, found.wait_end] == pytest.approx(spans)


@pytest.mark.parametrize(("rate", "hidden"), [(1e5, 0.75), (1e12, 0.0)])
def test_of_a_ring_products_hide_all_but_the_first_block(rate: float, hidden: float) -> None:
    """Where they take longer; where they take no time, nothing is hidden."""
    part = TensorSpec((1, 2, 4, 8), torch.float32)
    ring = ("tp", (4,) * 4, (0, 1, 2, 3), False, 0)
    args = (*map(Ref, "qkv"), None, False, 1.0, None, *ring)
    made = Node("y", "merakc.ring_attention.default", args, (), (part, part))
    cluster = Cluster("test", rate, 1e12, 0.0, 1, 0.0, 1e5)
    place, specs = place_on(cluster, 4), dict.fromkeys(map(Ref, "qkv"), part)
    found = pipelined(made, specs, place)
    assert found.wire_s == pytest.approx(link_seconds(made, specs, place))
    # Three blocks of keys and values leave a rank.
    assert found.wire_s == pytest.approx(3 * 2 * part.size_bytes / 1e5)
    assert found.hidden_s / found.wire_s == pytest.approx(hidden, abs=1e-3)
    inputs = tuple(Input(name, InputKind.BATCH, part) for name in "qkv")
    (noted,) = graph_collectives(Graph(inputs, (made,), ()), place)
    assert (noted.op, noted.axis) == ("all_to_all", "tp")
    # Of two ranks a node one sends to the other node, which carries as much as both.
    nodes = replace(place, fabric=Fabric(2, 1e6, 1e5, 0.0, 0.0))
    assert link_seconds(made, specs, nodes) == pytest.approx(3 * 2 * part.size_bytes / 1e5)


def test_a_chunk_has_those_of_each_of_its_graphs() -> None:
    one = Graph((X,), (summed("s"),), ())
    none = Graph((X,), (node(NEG),), ())
    found = chunk_collectives(3, StageGraphs(one, none, checkpoint=one), PLACE)
    assert {of: len(some) for of, some in found.items()} == {
        (3, ActionKind.FORWARD, False): 1,
        (3, ActionKind.FORWARD, True): 1,
        (3, ActionKind.BACKWARD, False): 0,
    }
