"""Activations that models write out, as torch's own calls.

GELU by tanh or erf (Hendrycks and Gimpel, arXiv 1606.08415) and SiLU take up to eight calls where a
model spells their formulas out, each of which reads and writes the widest tensors that there are,
and saves some for the backward. Any order of the factors and terms is recognised: of what stands
inside tanh, erf or sigmoid the coefficients as a polynomial in x are compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from merakc.ir.graph import Graph, Node, Ref

Polynomial = dict[int, float]  # coefficients, by power


class Form(NamedTuple):
    """`scale * x * outer(f(inner(x)))`, which is `op` of x."""

    scale: float
    outer: Polynomial
    inner: Polynomial
    op: str
    kwargs: tuple[tuple[str, str], ...]


_ROOT = math.sqrt(2 / math.pi)
FORMS: Mapping[str, Form] = {
    "aten.tanh.default": Form(
        0.5, {0: 1.0, 1: 1.0}, {1: _ROOT, 3: 0.044715 * _ROOT},
        "aten.gelu.default", (("approximate", "tanh"),),
    ),
    "aten.erf.default": Form(
        0.5, {0: 1.0, 1: 1.0}, {1: math.sqrt(0.5)}, "aten.gelu.default", (),
    ),
    "aten.sigmoid.default": Form(1.0, {1: 1.0}, {1: 1.0}, "aten.silu.default", ()),
}  # fmt: skip
MUL, ADD, SUB = "aten.mul.Tensor", "aten.add.Tensor", "aten.sub.Tensor"
DIV, POW = "aten.div.Tensor", "aten.pow.Tensor_Scalar"
HIGHEST = 3  # power


def with_activations(graph: Graph) -> Graph:
    """The same function, of fewer calls, where activations were written out.

    Constants may differ by less than a sixteenth of what rounding a number of the dtype changes.
    """
    if not any(node.op in FORMS for node in graph.nodes):
        return graph
    writer = _Writer(graph)
    nodes = tuple(writer.rewritten(node) for node in graph.nodes)
    return graph if nodes == graph.nodes else replace(graph, nodes=nodes).pruned()


class _Writer:
    """Finds what nodes of a graph compute."""

    def __init__(self, graph: Graph) -> None:
        self.nodes = {n.name: n for n in graph.nodes if len(n.outputs) == 1}
        self.specs = graph.specs()

    def rewritten(self, node: Node) -> Node:
        """The node, or the call of torch's that it is the last of."""
        if node.op not in (MUL, DIV) or not node.spec.dtype.is_floating_point:
            return node
        for scale, own in self._without_scales(Ref(node.name), node):
            product = self.nodes.get(own.node)
            if product is None or product.op != MUL or not _of_tensors(product):
                continue
            if product.grad != node.grad:
                continue
            for x, factor in (product.args, product.args[::-1]):
                found = self._activation(x, scale, factor, node)
                if found is not None:
                    return found
        return node

    def _activation(self, x: Ref, scale: float, factor: Ref, out: Node) -> Node | None:
        """What `scale * x * factor` is, in which x may have scales of its own."""
        inner = self._function_in(factor, out)
        if inner is None:
            return None
        form = FORMS[inner.op]
        outer = self._polynomial(factor, Ref(inner.name), out)
        unit = (outer or {}).get(1, 0.0)
        if outer is None or not _alike(outer, {k: c * unit for k, c in form.outer.items()}, out):
            return None
        for own, base in self._without_scales(x, out):
            if not _alike({0: scale * own * unit}, {0: form.scale}, out):
                continue
            is_own = self.specs[base].dtype == out.spec.dtype  # x may be of whole numbers
            made = self._polynomial(inner.args[0], base, out) if is_own else None
            if made is not None and _alike(made, form.inner, out):
                return replace(out, op=form.op, args=(base,), kwargs=form.kwargs)
        return None

    def _function_in(self, ref: Ref, out: Node) -> Node | None:
        """The tanh, erf or sigmoid of which a value is made with numbers alone."""
        while (node := self._like(ref, out)) is not None:
            if node.op in FORMS:
                return node
            if node.op not in (MUL, DIV, ADD, SUB) or len(node.refs) != 1:
                return None
            ref = node.refs[0]
        return None

    def _without_scales(self, ref: Ref, out: Node) -> Iterator[tuple[float, Ref]]:
        """What a value is, times a number: as it stands, and with each number taken away."""
        scale = 1.0
        yield scale, ref
        while (node := self._like(ref, out)) is not None and len(node.refs) == 1:
            numbers = [a for a in node.args if _is_number(a)]
            if node.kwargs or len(numbers) != 1 or len(node.args) != 2:
                return
            if node.op == MUL:
                scale *= numbers[0]
            elif node.op == DIV and node.args[1] == numbers[0] != 0:
                scale /= numbers[0]
            else:
                return
            ref = node.refs[0]
            yield scale, ref

    def _polynomial(self, value: Any, base: Ref, out: Node) -> Polynomial | None:
        """What a value is as a polynomial in another; None where it is none, or of high powers."""
        if value == base:
            return {1: 1.0}
        if _is_number(value):
            return {0: float(value)}
        node = self._like(value, out) if isinstance(value, Ref) else None
        if node is None or node.kwargs or len(node.args) != 2:
            return None
        if node.op not in (MUL, DIV, ADD, SUB, POW):
            return None
        left = self._polynomial(node.args[0], base, out)
        right = None if left is None else self._polynomial(node.args[1], base, out)
        if left is None or right is None:
            return None
        if node.op == POW:
            power = node.args[1]
            if not _is_number(power) or power not in range(1, HIGHEST + 1):
                return None
            found = {0: 1.0}
            for _ in range(int(power)):
                found = _times(found, left)
        elif node.op == DIV:
            if right.keys() != {0} or not right[0]:
                return None
            found = {k: c / right[0] for k, c in left.items()}
        elif node.op == MUL:
            found = _times(left, right)
        else:
            sign = 1.0 if node.op == ADD else -1.0
            found = {
                k: left.get(k, 0.0) + sign * right.get(k, 0.0) for k in left.keys() | right.keys()
            }
        return found if max(found) <= HIGHEST else None

    def _like(self, ref: Ref, out: Node) -> Node | None:
        """The node of a value of the shape and dtype of `out`, recorded with gradients as that."""
        node = self.nodes.get(ref.node)
        if node is None or node.grad != out.grad or node.spec != out.spec:
            return None
        return node


def _times(one: Polynomial, other: Polynomial) -> Polynomial:
    found: Polynomial = {}
    for k, a in one.items():
        for n, b in other.items():
            found[k + n] = found.get(k + n, 0.0) + a * b
    return found


def _alike(found: Polynomial, wanted: Polynomial, out: Node) -> bool:
    """Whether coefficients are these, up to rounding."""
    error = min(max(torch.finfo(out.spec.dtype).eps / 16, 2e-15), 1e-8)
    return found.keys() == wanted.keys() and all(
        math.isclose(found[k], wanted[k], rel_tol=error) for k in wanted
    )


def _of_tensors(node: Node) -> bool:
    return not node.kwargs and all(isinstance(a, Ref) for a in node.args)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
