"""Attention whose keys and values are repeated for the queries of a group, without the copies.

Models that share heads of keys and values expand them to one for each query head before they attend
to them. `merakc::attention` takes grouped heads as they are: no copy is made, kept for the backward
or moved, and no gradients of copies are added up.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace

from merakc.ir.graph import Graph, Node, Ref, TensorSpec

ATTENTION = "merakc.attention.default"
HEADS_DIM = 1
VIEWS = frozenset({"aten.reshape.default", "aten.view.default", "aten._unsafe_view.default"})
SAME = frozenset({"aten.alias.default", "aten.contiguous.default", "aten.clone.default"})


def with_grouped_heads(graph: Graph) -> Graph:
    """The same function, with attentions that read what was repeated as it was before."""
    makers, specs = {n.name: n for n in graph.nodes}, graph.specs()
    grads = graph.grad_values()
    nodes = tuple(
        _grouped(node, makers, specs, grads) if node.op == ATTENTION else node
        for node in graph.nodes
    )
    return graph if nodes == graph.nodes else replace(graph, nodes=nodes).pruned()


def _grouped(
    node: Node, makers: Mapping[str, Node], specs: Mapping[Ref, TensorSpec], grads: Set[Ref]
) -> Node:
    found = [_before(ref, makers, specs) for ref in node.args[1:3]]
    key, value = found
    if key is None or value is None:
        return node
    repeated = node.args[1:3]
    if any((was in grads) != (now in grads) for was, now in zip(repeated, found, strict=True)):
        return node  # copied without gradients
    if specs[key].shape[HEADS_DIM] != specs[value].shape[HEADS_DIM]:
        return node
    return replace(node, args=(node.args[0], key, value, *node.args[3:]))


def _before(ref: Ref, makers: Mapping[str, Node], specs: Mapping[Ref, TensorSpec]) -> Ref | None:
    """What heads `[b, h, t, d]` were repeated from, `[b, g, t, d]`; None where they were not.

    That is a dim of 1 behind the heads, expanded, and then one dim with them: head i of the result
    is head i // (h / g), as grouped attention reads it.
    """
    if (merged := _maker(ref, makers, VIEWS)) is None:
        return None
    if (expanded := _maker(merged.args[0], makers, {"aten.expand.default"})) is None:
        return None
    if (opened := _maker(expanded.args[0], makers, {"aten.unsqueeze.default"})) is None:
        return None
    source: Ref = opened.args[0]
    if len(specs[source].shape) != 4:
        return None
    batch, groups, *rest = specs[source].shape
    repeats = specs[Ref(expanded.name)].shape[HEADS_DIM + 1]
    wanted = (
        (Ref(opened.name), (batch, groups, 1, *rest)),
        (Ref(expanded.name), (batch, groups, repeats, *rest)),
        (Ref(merged.name), (batch, groups * repeats, *rest)),
    )
    if opened.args[1] not in (HEADS_DIM + 1, HEADS_DIM + 1 - 5):
        return None
    return source if all(specs[own].shape == shape for own, shape in wanted) else None


def _maker(ref: Ref, makers: Mapping[str, Node], ops: frozenset[str] | set[str]) -> Node | None:
    """The node of one of these ops that makes a value, behind copies and aliases of it."""
    node = makers.get(ref.node)
    while node is not None and node.op in SAME:
        node = makers.get(node.args[0].node)
    return node if node is not None and node.op in ops else None
