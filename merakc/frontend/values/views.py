"""Views that keep all elements of what they are of, and which of its dims a dim was."""

from __future__ import annotations

import math
from collections.abc import Sequence

from merakc.ir.graph import Node

# Those that keep the order of elements, and those that move dims.
RESHAPES = frozenset(
    f"aten.{name}"
    for name in ("reshape.default", "unsqueeze.default", "squeeze.dim", "squeeze.default",
                 "flatten.using_ints", "view.default")
)  # fmt: skip
MOVES = ("aten.permute.default", "aten.transpose.int", "aten.t.default")


def keeps_elements(node: Node) -> bool:
    """Whether a call is such a view."""
    return node.op in MOVES or node.op in RESHAPES


def dim_before(node: Node, shape: Sequence[int], dim: int) -> int | None:
    """Which dim of what a view is of, of this `shape`, is this one of the view; None where it is
    none, or the call is no such view.
    """
    out = node.spec.shape
    if node.op == "aten.permute.default":
        return int(node.args[1][dim]) % len(shape)
    if node.op in MOVES:
        order = list(range(len(shape)))
        one, other = node.args[1:3] if len(node.args) > 1 else (0, 1)
        order[one], order[other] = order[other], order[one]
        return int(order[dim])
    if node.op not in RESHAPES or out[dim] == 1:
        return None
    outer = math.prod(out[:dim])
    fitting = (k for k, n in enumerate(shape) if n == out[dim] and math.prod(shape[:k]) == outer)
    return next(fitting, None)
