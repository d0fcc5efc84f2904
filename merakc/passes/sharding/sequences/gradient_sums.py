"""The values of which each rank makes a part of the gradient, where ranks hold weights whole.

Ranks of cp make the gradients of a weight from their parts of a sequence. The sum of these parts is
wanted once a step, as that of dp ranks' is. It need not be made in a graph: what is computed of
parameters alone, alike on every rank, has a backward that is linear in the gradient, so that the
parts go through it. Where such a value is read by what every rank computes whole, each rank's
gradient of it is that of all, and counts as one of as many (`merakc.divide_gradient`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from merakc.ir.graph import Graph, InputKind, Ref
from merakc.ir.layout import Layout
from merakc.kernels.opaque import OPAQUE
from merakc.passes.sharding.layouts import SequenceSplit, Sharding, unsplit


def gradient_sums(
    graph: Graph, sequences: Iterable[SequenceSplit] = (), apart: Set[Ref] = frozenset()
) -> frozenset[Ref]:
    """The trained parameters, and what is computed of them alone outside of all `sequences`.

    But for those `apart`, of which ranks have parts of their own, as of experts, and for what
    functions of the user's make of them: their backwards may be anything.
    """
    inside = frozenset().union(*(split.nodes for split in sequences))
    grads = graph.grad_values()
    found = {Ref(i.name) for i in graph.inputs if i.kind is InputKind.PARAMETER} & grads - apart
    for node in graph.nodes:
        read = grads.intersection(node.refs)
        is_ours = node.op != OPAQUE and node.op not in graph.functions
        if read and read <= found and is_ours and node.name not in inside:
            found.update(grads.intersection(node.outs))
    return frozenset(found)


def computed_whole(graph: Graph, cp: int, splits: Mapping[str, Layout]) -> Sharding:
    """How a graph's values lie on ranks of cp that all compute on whole sequences, and have parts
    of some parameters, `splits` by their names, and of the gradients of all others.
    """
    parts = {Ref(i.name): splits[i.target] for i in graph.inputs if i.target in splits}
    layouts = {**unsplit(graph).layouts, **parts}
    sums = gradient_sums(graph, apart=parts.keys())
    return Sharding(cp, layouts, frozenset(), (), gathered=frozenset(parts), sums=sums)
