"""Live ranges against a count that looks at every value at every node."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from merakc.costs.work.memory import live_bytes, order_bytes
from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorSpec
from merakc.ir.program import ActionKind, Chunk

VIEW, CALL = "aten.alias.default", "aten.maximum.default"


def spec(size: int) -> TensorSpec:
    return TensorSpec((size,), torch.int8)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Random calls and views over two inputs, with some values kept."""
    sizes = {"a": 3, "b": 5}
    nodes = []
    for k in range(draw(st.integers(1, 12))):
        reads = draw(st.lists(st.sampled_from(sorted(sizes)), min_size=1, max_size=3))
        view = draw(st.booleans())
        size = sizes[reads[0]] if view else draw(st.integers(0, 9))
        args = tuple(map(Ref, reads[:1] if view else reads))
        nodes.append(Node(f"n{k}", VIEW if view else CALL, args, (), (spec(size),)))
        sizes[f"n{k}"] = size
    kept = draw(st.lists(st.sampled_from(sorted(sizes)), max_size=3, unique=True))
    inputs = tuple(Input(n, InputKind.BATCH, spec(sizes[n])) for n in "ab")
    outputs = tuple(Output(n, OutputKind.RESULT, Ref(n)) for n in kept)
    return Graph(inputs, tuple(nodes), outputs)


def counted(graph: Graph) -> tuple[int, int]:
    """Peak and kept bytes, written anew: which memory is still to be read after each node?"""
    home = {"a": "a", "b": "b"}
    for node in graph.nodes:
        home[node.name] = home[node.args[0].node] if node.op == VIEW else node.name
    size = {n.name: n.spec.numel for n in graph.nodes}
    kept = {home[o.ref.node] for o in graph.outputs} - {"a", "b"}
    peak = 0
    for k, node in enumerate(graph.nodes):
        later = {home[r.node] for n in graph.nodes[k:] for r in n.refs}
        made = {home[n.name] for n in graph.nodes[: k + 1]}
        alive = (made & (later | kept | {home[node.name]})) - {"a", "b"}
        peak = max(peak, sum(size[n] for n in alive))
    return peak, sum(size[n] for n in kept)


@given(graphs())
def test_live_ranges_equal_a_brute_count(graph: Graph) -> None:
    found = live_bytes(graph)
    assert (found.peak_bytes, found.kept_bytes) == counted(graph)


def test_saved_bytes_are_the_saved_values_and_the_received_activations_that_they_need() -> None:
    x = Input("x", InputKind.ACTIVATION, spec(4))
    unread = Input("u", InputKind.ACTIVATION, spec(100))
    weight = Input("w", InputKind.PARAMETER, spec(50))
    y, z = (Node(n, CALL, (Ref("x"), Ref("w")), (), (spec(s),)) for n, s in (("y", 7), ("z", 9)))
    view = Node("v", VIEW, (Ref("y"),), (), (spec(7),))
    saved = tuple(Output(n, OutputKind.SAVED, Ref(n)) for n in ("y", "v", "w"))
    forward = Graph((x, unread, weight), (y, z, view), saved)
    backward = Graph((x, weight, Input("saved:%y", InputKind.SAVED, spec(7), "y")), (), ())
    order = ActionKind.FORWARD, ActionKind.BACKWARD
    assert [b.held_bytes for b in order_bytes(Chunk(forward, backward), order)] == [7 + 4, 0]
    assert order_bytes(Chunk(forward, None), order)[0].held_bytes == 0
