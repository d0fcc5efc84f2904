"""Values of a graph that follow from its constants alone, whatever the batch and the weights."""

from __future__ import annotations

from typing import Any

import torch

from merakc.errors import ForwardError
from merakc.ir.graph import Graph, Node, Ref
from merakc.kernels.ops import resolve_op
from merakc.passes.autodiff.interpret import run_node

EMBEDDING = "aten.embedding.default"
# What is computed whole has at most so many elements.
MOST_ELEMENTS = 1 << 24


class FixedValues:
    """Those values, each computed once where it is asked for."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes = {n.name: n for n in graph.nodes}
        self.values: dict[Ref, Any] = {Ref(k): v for k, v in graph.constants.items()}
        self.names: set[str] = set(graph.constants)
        for node in graph.nodes:
            if all(r.node in self.names for r in node.refs) and not _is_random(graph, node):
                self.names.add(node.name)

    def whole(self, ref: Ref) -> torch.Tensor | None:
        """A value; None where it, or what it is computed from, is too large."""
        if ref not in self.values:
            node = self.nodes[ref.node]
            sizes = [o.numel for o in node.outputs if o is not None]
            if max(sizes) > MOST_ELEMENTS or any(self.whole(r) is None for r in node.refs):
                return None
            run_node(self.graph, node, self.values)
        found: torch.Tensor = self.values[ref]
        return found


def check_lookups(graph: Graph) -> None:
    """Raises `ForwardError` where a forward looks up rows that a table has not, in any batch of
    these shapes: positions beyond those that a model has learned.
    """
    looked_up = [n for n in graph.nodes if n.op == EMBEDDING]
    fixed = FixedValues(graph) if looked_up else None
    specs = graph.specs()
    for node in looked_up:
        table, places = node.args[:2]
        if fixed is None or places.node not in fixed.names:
            continue
        rows, found = specs[table].shape[0], fixed.whole(places)
        if found is not None and found.numel() and not 0 <= int(found.min()) <= found.max() < rows:
            raise ForwardError(
                f"the forward looks up rows {int(found.min())} to {int(found.max())} of "
                f"'{table.node}', which has {rows}, at {node.source}: it would fail on every batch "
                "of these shapes; give shorter texts, or a model with more positions"
            )


def tags(node: Node) -> list[torch.Tag]:
    """What torch says of the node's op."""
    return getattr(resolve_op(node.op), "tags", [])


def _is_random(graph: Graph, node: Node) -> bool:
    is_own = node.op in graph.functions or not node.op.startswith("aten.")
    return is_own or torch.Tag.nondeterministic_seeded in tags(node)
