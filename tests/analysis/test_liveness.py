"""Live ranges against a count that looks at every value at every node."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from merakc.analysis.liveness import live_bytes, working_bytes
from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorSpec

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


def test_a_ring_takes_two_blocks_while_it_runs() -> None:
    half = TensorSpec((1, 2, 4, 8), torch.bfloat16)
    args = (*map(Ref, "qkv"), None, True, 1.0, None, "cp", (4,) * 8, (*range(8),), True, 0)
    node = Node("y", "merakc.ring_attention.default", args, (), (half, half))
    specs = dict.fromkeys(map(Ref, "qkv"), half)
    assert working_bytes(node, specs) == 2 * 2 * half.size_bytes + 3 * half.size_bytes
