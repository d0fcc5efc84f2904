"""Sums over samples: what keeps them sums.

A map that is linear in its sums alone keeps them: the sum over parts of `f(x)` is `f` of the sum.
Where it is linear in several arguments together (`a + b`), a constant among them would count once
in every part; it is to count once in all.
"""

from __future__ import annotations

from collections.abc import Mapping

from merakc.ir.graph import Node, Ref, iter_refs
from merakc.passes.batches.states import Kind, Outcome, State, coupled, sums


def _ops(names: str) -> frozenset[str]:
    return frozenset(f"aten.{name if '.' in name else name + '.default'}" for name in names.split())


# Linear in all their arguments together.
JOINT = _ops(
    "add.Tensor sub.Tensor rsub.Tensor add.Scalar sub.Scalar rsub.Scalar stack cat where.self "
    "select_scatter slice_scatter index_put"
)
ADDED = _ops("add.Tensor sub.Tensor rsub.Tensor add.Scalar sub.Scalar rsub.Scalar")
# The argument that says which of the others count, and where.
CHOOSING = {"aten.where.self": 0, "aten.index_put.default": 1}
# Linear in their first argument, whatever the others are.
FIRST = _ops(
    "neg div.Tensor div.Scalar sum sum.dim_IntList mean mean.dim reshape expand transpose.int "
    "permute t unsqueeze squeeze.dim squeeze.dims squeeze slice.Tensor select.int unbind.int "
    "split.Tensor split_with_sizes diagonal diagonal_copy trace contiguous clone alias detach "
    "to.dtype to.device index.Tensor index_select tril triu flip roll cumsum repeat mul.Scalar"
)
FILLED = _ops("masked_fill.Scalar")  # linear where they fill with 0
PRODUCTS = _ops("mul.Tensor mm bmm matmul dot mv")
LINEAR = "aten.linear.default"


def of_sums(node: Node, states: Mapping[Ref, State]) -> Outcome:
    """The outcome of a node of which an argument is a sum."""
    summed = [r for r in node.refs if states[r].kind is Kind.SUM]
    if any(states[r].sampled or states[r].kind is Kind.ROWS for r in node.refs):
        return coupled(node, "samples meet a sum over samples")
    if node.op in JOINT:
        choosing = node.args[CHOOSING[node.op]] if node.op in CHOOSING else ()
        if any(r in summed for r in iter_refs((choosing,))):
            return coupled(node, "a choice by a sum over samples")
        return sums(node, once=True) if _is_float(node) else coupled(node, "whole numbers added up")
    if node.op in PRODUCTS and len(summed) == 1:
        return sums(node)
    if node.op == LINEAR and summed == [node.args[0]] and (len(node.args) < 3 or not node.args[2]):
        return sums(node)
    linear = node.op in FIRST or (node.op in FILLED and node.args[2] == 0)
    cast = node.op.startswith("aten.to.") or "dtype" in dict(node.kwargs)
    rounded = cast and not _is_float(node)
    modes = node.op.startswith("aten.div.") and "rounding_mode" in dict(node.kwargs)
    if linear and summed == [node.args[0]] and not rounded and not modes:
        return sums(node)
    return coupled(node, "not linear in a sum over samples")


def _is_float(node: Node) -> bool:
    return node.spec.dtype.is_floating_point or node.spec.dtype.is_complex
