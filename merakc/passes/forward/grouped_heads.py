"""Attention whose keys and values are repeated for the queries of a group, without the copies.

Models that share heads of keys and values expand them to one for each query head before they attend
to them. `merakc::attention` takes grouped heads as they are: no copy is made, kept for the backward
or moved, and no gradients of copies are added up.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace

from merakc.ir.graph import Graph, Node, Ref, TensorSpec
from merakc.kernels.ring.attention import RING
from merakc.kernels.ring.swap import SWAP

ATTENTION = "merakc.attention.default"
ATTENTIONS = frozenset({ATTENTION, RING})
BEFORE = ".shared"  # ends the names of swaps of rows that stand before what repeats heads
HEADS_DIM = 1
VIEWS = frozenset({"aten.reshape.default", "aten.view.default", "aten._unsafe_view.default"})
SAME = frozenset({"aten.alias.default", "aten.contiguous.default", "aten.clone.default"})


def with_grouped_heads(graph: Graph) -> Graph:
    """The same function, with attentions that read what was repeated as it was before."""
    makers, specs = {n.name: n for n in graph.nodes}, dict(graph.specs())
    grads, nodes = set(graph.grad_values()), list[Node]()
    for node in graph.nodes:
        if node.op == SWAP and (source := _before(node.args[0], makers, specs)) is not None:
            nodes.append(_swapped(node, source, specs))
            own = Ref(nodes[-1].name)
            makers[own.node], specs[own] = nodes[-1], nodes[-1].spec
            if source in grads:
                grads.add(own)
        nodes.append(_grouped(node, makers, specs, grads) if node.op in ATTENTIONS else node)
    found = tuple(nodes)
    return graph if found == graph.nodes else replace(graph, nodes=found).pruned()


def _swapped(node: Node, source: Ref, specs: Mapping[Ref, TensorSpec]) -> Node:
    """The swap of what was repeated, in the place of one of what it was repeated to."""
    batch, heads, _, width = specs[source].shape
    spec = TensorSpec((batch, heads, node.spec.shape[2], width), node.spec.dtype)
    args = (source, *node.args[1:])
    return replace(node, name=f"{node.name}{BEFORE}", args=args, outputs=(spec,))


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
    if f"{ref.node}{BEFORE}" in makers:
        return Ref(f"{ref.node}{BEFORE}")
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
