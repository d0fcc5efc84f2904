"""Calls whose gradients are numbers wherever their arguments are.

Rows that no expert has are computed on like others, and nothing is read of them: their gradients
are zero, and stay so behind such calls. Nothing times what is infinite is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from merakc.ir.graph import Node, Ref
from merakc.passes.sharding.dims import given, signature

TAME = frozenset(
    f"aten.{name}"
    for name in (
        "add.Tensor", "sub.Tensor", "mul.Tensor", "neg.default", "relu.default", "gelu.default",
        "silu.default", "tanh.default", "sigmoid.default", "to.dtype", "clone.default",
        "unsqueeze.default", "squeeze.dim", "reshape.default", "linear.default", "matmul.default",
        "mm.default", "slice.Tensor", "split.Tensor", "leaky_relu.default", "square.default",
        "index.Tensor", "detach.default", "contiguous.default", "softmax.int", "mean.dim",
        "sum.dim_IntList", "erf.default", "hardtanh.default", "clamp.default", "softplus.default",
        "abs.default", "chunk.default", "unbind.int", "mish.default", "hardswish.default",
    )
)  # fmt: skip
NORMS = ("aten.layer_norm.default", "aten.rms_norm.default")
POWER, DIVIDE, SUM = "aten.pow.Tensor_Scalar", "aten.div.Tensor", "aten.add.Tensor"
# Calls of which those of positive numbers are tame, and those that give no number below zero.
ROOTS = ("aten.rsqrt.default", "aten.sqrt.default", "aten.log.default", "aten.reciprocal.default")
SQUARES = ("aten.square.default", "aten.relu.default", "aten.abs.default", "aten.sigmoid.default")
KEEPS_SIGNS = ("aten.mean.dim", "aten.sum.dim_IntList", "aten.to.dtype", "aten.reshape.default",
               "aten.mul.Tensor")  # fmt: skip


def is_tame(node: Node, calls: Sequence[Node]) -> bool:
    """Whether a call is such a one; `calls` make what it reads."""
    made = {n.name: n for n in calls}
    if node.op in NORMS:
        eps = given(node, "eps") if "eps" in signature(node.op) else None
        return isinstance(eps, float) and eps > 0
    if node.op == POWER:
        power = node.args[1]
        return power == int(power) >= 1 if isinstance(power, int | float) else False
    if node.op == DIVIDE:
        by = node.args[1]
        return by != 0 if isinstance(by, int | float) else _is_positive(by, made)
    if node.op in ROOTS:
        return _is_positive(node.args[0], made)
    return node.op in TAME


def _is_positive(value: Any, made: dict[str, Node]) -> bool:
    """Whether a value is a number above zero added to what is not below."""
    node = made.get(value.node) if isinstance(value, Ref) else None
    if node is None or node.op != SUM or given(node, "alpha") != 1:
        return False
    one, other = node.args[:2]
    return isinstance(other, int | float) and other > 0 and _is_positive_or_zero(one, made)


def _is_positive_or_zero(value: Any, made: dict[str, Node]) -> bool:
    node = made.get(value.node) if isinstance(value, Ref) else None
    if node is None:
        return False
    if node.op == POWER:
        return bool(node.args[1] == 2)
    if node.op in KEEPS_SIGNS:
        return all(_is_positive_or_zero(ref, made) for ref in node.refs) and all(
            not isinstance(x, int | float) or x >= 0
            for x in (node.args[1:2] if node.op == "aten.mul.Tensor" else ())
        )
    return node.op in SQUARES or (node.op == SUM and _is_positive(value, made))
