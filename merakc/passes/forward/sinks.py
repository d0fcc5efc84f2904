"""Attention with sinks that a model writes out in products, as one call.

Models with sinks (GPT-OSS and others; Xiao et al., arXiv 2309.17453) put a learned score of each
head beside those of the keys, take the softmax of all, and leave the sink's share out. No kernel of
torch's does that by itself, so that they spell it out: several tensors of queries times keys are
made and kept. `merakc::attention` takes sinks, and makes none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from contextlib import suppress
from dataclasses import replace
from typing import Any

from merakc.ir.graph import Graph, Node, Ref, TensorSpec
from merakc.kernels.attention_formulas import lse_dtype
from merakc.passes.forward.grouped_heads import ATTENTION, SAME, VIEWS

SOFTMAX, MATMUL, CAT = "aten.softmax.int", "aten.matmul.default", "aten.cat.default"
MUL, DIV, ADD, SUB = "aten.mul.Tensor", "aten.div.Tensor", "aten.add.Tensor", "aten.sub.Tensor"
MOST = {"aten.max.dim", "aten.amax.default"}
LAST = (-1, 3)


class _NotOneError(Exception):
    """Something else is computed."""


def with_sinks(graph: Graph) -> Graph:
    """The same function, whose attentions with sinks are calls of `merakc::attention`."""
    if not any(node.op == SOFTMAX for node in graph.nodes):
        return graph
    finder = _Finder(graph)
    nodes = tuple(finder.rewritten(node) for node in graph.nodes)
    return graph if nodes == graph.nodes else replace(graph, nodes=nodes).pruned()


def _need(holds: bool) -> None:
    if not holds:
        raise _NotOneError


class _Finder:
    """Finds what nodes of a graph compute."""

    def __init__(self, graph: Graph) -> None:
        self.nodes, self.specs = {n.name: n for n in graph.nodes}, graph.specs()
        self.grads = graph.grad_values()
        self.uses = Counter(r for n in graph.nodes for r in n.refs)
        self.uses.update(o.ref for o in graph.outputs)

    def rewritten(self, node: Node) -> Node:
        """The node, or the attention that it is the last product of."""
        try:
            return self._attention(node)
        except _NotOneError:
            return node

    def _attention(self, node: Node) -> Node:
        _need(node.op == MATMUL and node.grad and len(node.spec.shape) == 4)
        shares, value = node.args
        scores, sink = self._parts(self._softmax(shares))
        query, key, scale, mask = self._scores(scores)
        (b, h, s, d), t = self.specs[query].shape, self.specs[key].shape[2]
        _need(self.specs[key].shape == (b, h, t, d) and self.specs[scores].shape == (b, h, s, t))
        _need(self.specs[value].shape[:3] == (b, h, t) and self.specs[sink].shape == (h,))
        _need(len({self.specs[r].dtype for r in (query, key, value)}) == 1)
        sums = TensorSpec((b, h, s), lse_dtype(node.spec.dtype))
        args = (query, key, value, mask, False, scale, 0, sink)
        return replace(node, op=ATTENTION, args=args, outputs=(node.spec, sums))

    def _of(self, ref: Any, *ops: str) -> Node:
        """The node of one of these ops that makes a value which nothing else reads."""
        _need(isinstance(ref, Ref) and ref.node in self.nodes and self.uses[ref] == 1)
        node = self.nodes[ref.node]
        _need(node.grad)  # so that the one call's gradients are those of the calls
        casts = node.op == "aten.to.dtype" and node.spec.dtype.is_floating_point
        if node.op in SAME or casts:
            return self._of(node.args[0], *ops)
        _need(node.op in ops)
        return node

    def _softmax(self, ref: Ref) -> Node:
        """The softmax of which a value is all but the last share."""
        part = self._of(ref, "aten.slice.Tensor")
        _need(len(part.args) == 4)
        of, dim, start, end = part.args
        _need(dim in LAST and not start and end in (-1, self.specs[of].shape[-1] - 1))
        found = self._of(of, SOFTMAX)
        _need(found.args[1] in LAST)
        return found

    def _parts(self, softmax: Node) -> tuple[Ref, Ref]:
        """The scores of keys, and those of sinks, one a head: what is subtracted of a whole row
        changes no share, and has no gradient.
        """
        ref = softmax.args[0]
        join = self._of(ref, CAT, SUB)
        if join.op == SUB:
            joined, most = join.args
            _need(isinstance(most, Ref) and self._read(most, MOST) == joined)
            _need(self.specs[most].shape == (*self.specs[joined].shape[:-1], 1))
            _need(self.uses[joined] == 2 and not join.kwargs)
            self._read(joined, {CAT})
            join = self.nodes[joined.node]
        _need(len(join.args) == 2 and join.args[1] in LAST and len(join.args[0]) == 2)
        keys, sinks = join.args[0]
        return keys, self._by_head(sinks)

    def _by_head(self, ref: Ref) -> Ref:
        """The values [heads] of which all rows of a value [samples, heads, rows, 1] are made."""
        _, heads, _, one = self.specs[ref].shape
        _need(one == 1)
        ref = self._read(ref, {"aten.expand.default"})
        _need(self.specs[ref].shape in ((1, heads, 1, 1), (heads, 1, 1)))
        while len(self.specs[ref].shape) > 1:
            ref = self._read(ref, VIEWS | {"aten.unsqueeze.default"})
            _need(self.specs[ref].numel == heads)
        return ref

    def _read(self, ref: Ref, ops: Set[str]) -> Ref:
        """What the node of one of these ops reads that makes a value."""
        node = self.nodes.get(ref.node)
        if node is None or node.op not in ops or not node.grad:
            raise _NotOneError
        read: Ref = node.args[0]
        return read

    def _scores(self, ref: Ref) -> tuple[Ref, Ref, float, Ref | None]:
        """Queries, keys, scale and mask of scores."""
        node = self._of(ref, ADD, MUL, DIV, MATMUL)
        if node.op != ADD:
            return (*self._products(ref), None)
        _need(len(node.args) == 2 and not node.kwargs)
        for own, mask in (node.args, node.args[::-1]):
            is_mask = isinstance(mask, Ref) and mask not in self.grads
            if is_mask and self.specs[mask].dtype.is_floating_point:  # others say who is seen
                with suppress(_NotOneError):
                    return (*self._products(own), mask)
        raise _NotOneError

    def _products(self, ref: Ref) -> tuple[Ref, Ref, float]:
        """Queries, keys and scale of their products."""
        node, scale = self._of(ref, MUL, DIV, MATMUL), 1.0
        if node.op != MATMUL:
            _need(isinstance(node.args[1], int | float))
            scale = node.args[1] if node.op == MUL else 1 / node.args[1]
            node = self._of(node.args[0], MATMUL)
        query, turned = node.args
        turn = self._of(turned, "aten.transpose.int")
        _need({dim % 4 for dim in turn.args[1:]} == {2, 3})
        return query, turn.args[0], float(scale)
