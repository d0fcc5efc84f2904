"""Cross-entropies of the scores of many classes, computed with the product that makes the scores.

Scores of rows for each word of a vocabulary are often the largest values of a step, in the dtype
of the product and once or twice more in float32. The loss reads two numbers of each row. So it is
computed from what the product reads (`merakc.kernels.scores`), block by block, and the backward
makes the blocks again: one more product for several tensors of that size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import torch

from merakc.ir.graph import Graph, Node, Ref, TensorSpec
from merakc.passes.sharding.dims import given

ENTROPY: Final = "aten.cross_entropy_loss.default"
PARALLEL: Final = "composite.vocab_parallel_cross_entropy"
BLOCKWISE: Final = "composite.linear_cross_entropy"
VIEWS = frozenset({"aten.reshape.default", "aten.view.default", "aten._unsafe_view.default"})
SAME = frozenset({"aten.alias.default", "aten.contiguous.default"})
CASTS = frozenset({"aten.to.dtype", "aten._to_copy.default"})
# Scores of fewer bytes, in float32, stay whole: to make them again would not be worth the time.
LEAST_BYTES: Final = 256 << 20


def without_scores(graph: Graph, least_bytes: float | None = None) -> Graph:
    """A rank's forward without the scores that only a cross-entropy reads, of more bytes than the
    least (`LEAST_BYTES`).

    Between the product and the loss are views that keep a row of scores in one piece, and casts to
    more bits. Where classes are weighed, or labels smoothed or of several classes, scores stay.
    """
    found: dict[str, list[Node]] = {}
    least_bytes = LEAST_BYTES if least_bytes is None else least_bytes
    for node in graph.nodes:
        if node.op in (ENTROPY, PARALLEL):
            written = _Loss(graph, node).written(least_bytes)
            if written is not None:
                found[node.name] = written
    if not found:
        return graph
    nodes = (new for node in graph.nodes for new in found.get(node.name, [node]))
    return replace(graph, nodes=tuple(nodes)).pruned()


class _Loss:
    """A cross-entropy, and where its scores come from."""

    def __init__(self, graph: Graph, node: Node) -> None:
        self.specs, self.node = graph.specs(), node
        self.makers = {n.name: n for n in graph.nodes}
        users = graph.users()
        left = {o.ref.node for o in graph.outputs}
        self.alone = {
            n for n in self.makers if len(users.get(n, ())) == 1 and n not in left
        }  # a stage may have received scores

    def written(self, least_bytes: float) -> list[Node] | None:
        """The nodes in its place; None where it stays."""
        product, how = self._product(), self._how()
        if product is None or how is None:
            return None
        x, weight, bias = product
        shape = self.specs[self.node.args[0]].shape
        if shape[0] * shape[1] * torch.float32.itemsize <= least_bytes:
            return None
        width = self.specs[x].shape[-1]
        spec = TensorSpec((shape[0], width), self.specs[x].dtype)
        rows = Node(f"{self.node.name}.rows", "aten.reshape.default", (x, spec.shape), (), (spec,))
        args = (Ref(rows.name), weight, bias, self.node.args[1], *how)
        dtype = torch.promote_types(spec.dtype, torch.float32)
        summed = self.node.spec._replace(dtype=dtype)
        loss = replace(self.node, op=BLOCKWISE, args=args, kwargs=(), outputs=(summed,))
        if dtype == self.node.spec.dtype:
            return [rows, loss]
        loss = replace(loss, name=f"{self.node.name}.wide")
        cast = Ref(loss.name), self.node.spec.dtype
        return [rows, loss, replace(self.node, op="aten.to.dtype", args=cast, kwargs=())]

    def _how(self) -> tuple[Any, ...] | None:
        """The arguments behind the labels: reduction, what is ignored, and which classes; None of
        losses that read more than the sum and one score of each row.
        """
        node = self.node
        scores, labels = (self.specs[ref] for ref in node.args[:2])
        if len(scores.shape) != 2 or labels.dtype.is_floating_point:
            return None
        if node.op == PARALLEL:
            _, _, start, vocab, reduction, ignored, smoothing, *axis = node.args
            how = reduction, ignored, vocab, start, *(axis or ("tp",))
            return None if smoothing else how
        if given(node, "weight") is not None or given(node, "label_smoothing"):
            return None
        return given(node, "reduction"), given(node, "ignore_index"), scores.shape[1]

    def _product(self) -> tuple[Ref, Ref, Ref | None] | None:
        """The rows, weights and bias of the product that makes the scores, where nothing else reads
        them.
        """
        ref = self.node.args[0]
        classes = self.specs[ref].shape[-1]
        while ref.node in self.alone:
            maker = self.makers[ref.node]
            if maker.op == "aten.linear.default":
                return _linear(maker)
            if maker.spec.shape[-1:] != (classes,) or not self._keeps(maker):
                return None
            ref = maker.args[0]
        return None

    def _keeps(self, node: Node) -> bool:
        """Whether a node gives each row of scores as it was."""
        before = self.specs[node.refs[0]]
        if node.op in CASTS:
            return torch.promote_types(before.dtype, node.spec.dtype) == node.spec.dtype
        return node.op in SAME or (node.op in VIEWS and before.shape[-1] == node.spec.shape[-1])


def _linear(node: Node) -> tuple[Ref, Ref, Ref | None]:
    named: Mapping[str, Any] = dict(node.kwargs)
    bias = node.args[2] if len(node.args) > 2 else named.get("bias")
    return node.args[0], node.args[1], bias
