"""Algebra on a traced graph: the same values, to the last bit, in fewer passes over memory.

Backward formulas are written for one call at a time. Put together they multiply by one, scale a
large tensor where a small one would do, and put parts into tensors of zeros to add these up. Only
the sign of a zero may differ, and numbers next to overflow or underflow, where a power of two is
multiplied earlier.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from merakc.ir.graph import Graph, Node, Ref, TensorSpec, map_refs
from merakc.kernels.ops import returns_view

# What leaves its first argument as it is, by the number behind it.
NEUTRAL = {
    "aten.pow.Tensor_Scalar": 1,
    "aten.mul.Tensor": 1,
    "aten.mul.Scalar": 1,
    "aten.div.Tensor": 1,
    "aten.div.Scalar": 1,
    "aten.add.Tensor": 0,
    "aten.add.Scalar": 0,
    "aten.sub.Tensor": 0,
    "aten.sub.Scalar": 0,
}
SCALINGS = frozenset(
    f"aten.{name}.{overload}" for name in ("mul", "div") for overload in ("Tensor", "Scalar")
)
ZEROS = frozenset(
    {"aten.new_zeros.default", "aten.zeros_like.default", "aten.zeros.default"}
)  # fmt: skip
# Dtypes of fewer bytes overflow soon where a factor is moved.
LEAST_ITEMSIZE = 4

Rule = Callable[["_Rewriter", Node], list[Node] | Ref | None]


def fewer_passes(graph: Graph) -> Graph:
    """The same function with the `RULES` applied once, in the order of the nodes."""
    return _Rewriter(graph).run()


class _Rewriter:
    """Goes through a graph; `nodes` are those that are written, in the place of the graph's."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.specs = graph, dict(graph.specs())
        self.nodes: list[Node] = []
        self.made: dict[str, Node] = {}
        self.now: dict[Ref, Ref] = {}
        self.reads = Counter(r for n in graph.nodes for r in n.refs)
        self.reads.update(o.ref for o in graph.outputs)
        # What must stay as it lies in memory: a view that was possible is not of every expansion.
        self.laid = {o.ref for o in graph.outputs}
        for node in graph.nodes:
            if returns_view(node.op):
                self.laid.update(node.refs)

    def run(self) -> Graph:
        """The graph in the end."""
        for node in self.graph.nodes:
            if not self.now.keys().isdisjoint(node.refs):
                node = node.reading(*map_refs((node.args, node.kwargs), self._now))
            if node.op not in RULED:
                self.nodes.append(node)
                self.made[node.name] = node
                continue
            made = (rule(self, node) for rule in RULES)
            found: list[Node] | Ref = next((m for m in made if m is not None), [node])
            if isinstance(found, Ref):
                self.now[Ref(node.name)] = found
                self.reads[found] += self.reads[Ref(node.name)] - 1
                continue
            for new in found:
                self.nodes.append(new)
                self.made[new.name] = new
                self.specs[Ref(new.name)] = new.spec if new.outputs[0] else self.specs[new.refs[0]]
        outputs = tuple(o.at(self._now(o.ref)) for o in self.graph.outputs)
        return replace(self.graph, nodes=tuple(self.nodes), outputs=outputs).pruned()

    def _now(self, ref: Ref) -> Ref:
        return self.now.get(ref, ref)

    def is_view(self, ref: Ref) -> bool:
        """Whether a value lies in another's memory."""
        return ref.node in self.made and returns_view(self.made[ref.node].op)

    def only_here(self, value: Any, *ops: str) -> Node | None:
        """The node that makes a value which is read once, where it is one of `ops`."""
        if not isinstance(value, Ref) or value.index or self.reads[value] != 1:
            return None
        node = self.made.get(value.node)
        return node if node is not None and node.op in ops else None


def _neutral(graph: _Rewriter, node: Node) -> Ref | None:
    """A product with one, a sum with zero, a first power; of floats, since indices are moved by
    where a rank's part starts, and all ranks of a group are to have the same nodes.
    """
    if node.op not in NEUTRAL or node.kwargs or len(node.args) != 2:
        return None
    if not node.spec.dtype.is_floating_point:
        return None
    x, number = node.args
    same = _is_number(number) and number == NEUTRAL[node.op]
    if Ref(node.name) in graph.laid and isinstance(x, Ref) and graph.is_view(x):
        return None
    return x if same and isinstance(x, Ref) and graph.specs[x] == node.spec else None


def _scaled_expansion(graph: _Rewriter, node: Node) -> list[Node] | None:
    """An expanded value that is scaled: scaled before."""
    if not _is_scaling(node) or Ref(node.name) in graph.laid:
        return None
    wide = graph.only_here(node.args[0], EXPAND)
    if wide is None or not _is_float(node.spec):
        return None
    small, *sizes = wide.args
    spec = TensorSpec(graph.specs[small].shape, node.spec.dtype)
    scaled = replace(node, name=f"{node.name}.small", args=(small, node.args[1]), outputs=(spec,))
    return [scaled, replace(wide, name=node.name, args=(Ref(scaled.name), *sizes),
                            outputs=node.outputs)]  # fmt: skip


def _scaled_factor(graph: _Rewriter, node: Node) -> list[Node] | None:
    """A product of an expanded value and one scaled by a power of two: the smaller is scaled."""
    if node.op != "aten.mul.Tensor" or not _is_float(node.spec):
        return None
    for wide, scaled in (node.args, node.args[::-1]):
        expansion, scaling = graph.only_here(wide, EXPAND), graph.only_here(scaled, *SCALINGS)
        if expansion is None or scaling is None or not _is_scaling(scaling):
            continue
        if abs(math.frexp(scaling.args[1])[0]) != 0.5:  # others round
            continue
        small, *sizes = expansion.args
        specs = graph.specs
        if not specs[small].dtype == specs[scaling.args[0]].dtype == node.spec.dtype:
            continue
        name = f"{node.name}.small"
        less = replace(scaling, name=name, args=(small, scaling.args[1]), outputs=(specs[small],))
        wider = replace(expansion, name=f"{node.name}.wide", args=(Ref(name), *sizes))
        return [less, wider, replace(node, args=(Ref(wider.name), scaling.args[0]))]
    return None


def _joined_parts(graph: _Rewriter, node: Node) -> list[Node] | None:
    """A sum of two parts, each in zeros where the other is: both, side by side."""
    if node.op != ADD or len(node.args) != 2 or node.kwargs:
        return None
    parts = [graph.only_here(arg, SLICED) for arg in node.args]
    found = []
    for part in parts:
        if part is None or part.args[5] != 1 or part.spec != node.spec:
            return None
        grad, shape, dim, start, end, _ = part.args
        length = shape[dim]
        found.append((*slice(start, end).indices(length)[:2], dim % len(shape), grad))
    (start, middle, dim, _), (again, end, other, _) = found = sorted(found, key=lambda f: f[:3])
    if (start, end) != (0, node.spec.shape[dim]) or middle != again or dim != other:
        return None
    grads = tuple(grad for *_, grad in found)
    return [replace(node, op="aten.cat.default", args=(grads, dim))]


def _added_there(graph: _Rewriter, node: Node) -> list[Node] | None:
    """A sum with values that were scattered into zeros of its shape: scattered into the other."""
    if node.op != ADD or len(node.args) != 2 or node.kwargs:
        return None
    for other, scattered in (node.args, node.args[::-1]):
        scatter = graph.only_here(scattered, SCATTER)
        if scatter is None or not isinstance(other, Ref) or scatter.spec != node.spec:
            continue
        zeros = graph.made.get(scatter.args[0].node)
        if zeros is not None and zeros.op in ZEROS and graph.specs[other] == node.spec:
            return [replace(node, op=SCATTER, args=(other, *scatter.args[1:]))]
    return None


ADD, EXPAND = "aten.add.Tensor", "aten.expand.default"
SLICED, SCATTER = "aten.slice_backward.default", "aten.scatter_add.default"
RULES: tuple[Rule, ...] = (
    _neutral, _scaled_expansion, _scaled_factor, _joined_parts, _added_there,
)  # fmt: skip
RULED = frozenset({*NEUTRAL, *SCALINGS, ADD})  # of which there are rules


def _is_scaling(node: Node) -> bool:
    """Whether a tensor is multiplied or divided by a number."""
    plain = node.op in SCALINGS and len(node.args) == 2 and not node.kwargs
    return plain and isinstance(node.args[0], Ref) and _is_number(node.args[1])


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_float(spec: TensorSpec) -> bool:
    return spec.dtype.is_floating_point and spec.dtype.itemsize >= LEAST_ITEMSIZE
