"""The table of sharding rules: one row an op.

A row names the dims of the op's tensor arguments and outputs, like an einsum: in
`"... i, o i, o -> ... o"` (linear) the letter `i` is summed, so that a split of `i` leaves partial
sums. Marks behind a letter:

- `!` the op needs the dim whole;
- `?` before an argument: it may be None.

`...` stands for the leading dims, the same in every place. A dim of size 1 broadcasts. Ops whose
dims depend on their arguments have a kind instead of an einsum: `POINTWISE`, `along(k)` (needs
whole the dim that argument k names), `reduce(...)`, or a function of `merakc.passes.propagate`.
An op without a row is kept whole on every tp rank, and reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch


@dataclass(frozen=True, slots=True)
class Along:
    """Keeps all dims; needs whole the dim(s) that argument `argument` names."""

    argument: int
    default: int = -1


@dataclass(frozen=True, slots=True)
class Reduce:
    """Removes the dims that argument 1 names; `partial`: a split one leaves partial sums."""

    partial: bool


@dataclass(frozen=True, slots=True)
class Shape:
    """A rule of its own, by name, in `merakc.passes.propagate`."""

    name: str


POINTWISE: Final = "pointwise"
Row = str | Along | Reduce | Shape

ROWS: Final[dict[str, Row]] = {
    # products
    "aten.linear.default": "... i, o i, ?o -> ... o",
    "aten.addmm.default": Shape("addmm"),
    "aten.mm.default": "m i, i n -> m n",
    "aten.bmm.default": "b m i, b i n -> b m n",
    "aten.baddbmm.default": "b m n, b m i!, b i! n -> b m n",
    "aten.matmul.default": Shape("matmul"),
    "merakc.attention.default": Shape("attention"),
    "aten.convolution.default": Shape("convolution"),
    # tables and losses
    "aten.embedding.default": Shape("embedding"),
    "aten.cross_entropy_loss.default": Shape("cross_entropy"),
    # norms
    "aten.layer_norm.default": Shape("norm"),
    "aten.rms_norm.default": Shape("norm"),
    "aten.batch_norm.default": Shape("batch_norm"),
    # along one dim
    "aten.softmax.int": Along(1),
    "aten.log_softmax.int": Along(1),
    "aten.cumsum.default": Along(1),
    "aten.argmax.default": Reduce(partial=False),
    "aten.argmin.default": Reduce(partial=False),
    "aten.sort.default": Along(1),
    "aten.flip.default": Along(1),
    # reductions
    "aten.sum.default": Reduce(partial=True),
    "aten.sum.dim_IntList": Reduce(partial=True),
    "aten.mean.default": Reduce(partial=False),
    "aten.mean.dim": Reduce(partial=False),
    "aten.var_mean.correction": Reduce(partial=False),
    "aten.var.correction": Reduce(partial=False),
    "aten.amax.default": Reduce(partial=False),
    "aten.amin.default": Reduce(partial=False),
    "aten.max.dim": Reduce(partial=False),
    "aten.logsumexp.default": Reduce(partial=False),
    "aten.linalg_vector_norm.default": Shape("opaque"),
    # views and layouts
    "aten.reshape.default": Shape("reshape"),
    "aten.expand.default": Shape("expand"),
    "aten.transpose.int": Shape("transpose"),
    "aten.permute.default": Shape("permute"),
    "aten.t.default": Shape("t"),
    "aten.unsqueeze.default": Shape("unsqueeze"),
    "aten.squeeze.dim": Shape("squeeze"),
    "aten.squeeze.dims": Shape("squeeze"),
    "aten.squeeze.default": Shape("reshape"),
    "aten.slice.Tensor": Shape("slice"),
    "aten.select.int": Shape("select"),
    "aten.index.Tensor": Shape("index"),
    "aten.unbind.int": Shape("select"),
    "aten.split.Tensor": Shape("split"),
    "aten.split_with_sizes.default": Shape("split"),
    "aten.cat.default": Shape("cat"),
    "aten.stack.default": Shape("stack"),
    "aten.slice_scatter.default": Along(2, 0),
    "aten.constant_pad_nd.default": Shape("pad"),
    # tensors from nothing
    "aten.arange.default": Shape("fresh"),
    "aten.arange.start": Shape("fresh"),
    "aten.arange.start_step": Shape("fresh"),
    "aten.full.default": Shape("fresh"),
    "aten.zeros.default": Shape("fresh"),
    "aten.ones.default": Shape("fresh"),
    "aten.scalar_tensor.default": Shape("fresh"),
    "aten.new_ones.default": Shape("fresh"),
    "aten.new_zeros.default": Shape("fresh"),
    "aten.new_full.default": Shape("fresh"),
    # elementwise ops that torch does not tag as such
    "aten.to.dtype": POINTWISE,
    "aten.to.dtype_layout": POINTWISE,
    "aten.to.device": POINTWISE,
    "aten.to.other": POINTWISE,
    "aten.contiguous.default": POINTWISE,
    "aten.clone.default": POINTWISE,
    "aten.detach.default": POINTWISE,
    "aten.alias.default": POINTWISE,
    "aten.fill.Tensor": POINTWISE,
    "aten.fill.Scalar": POINTWISE,
    "aten.full_like.default": POINTWISE,
    "aten.zeros_like.default": POINTWISE,
    "aten.ones_like.default": POINTWISE,
    "aten.empty_like.default": POINTWISE,
    "aten.masked_fill.Scalar": POINTWISE,
    "aten.masked_fill.Tensor": POINTWISE,
    "merakc.dropout.default": POINTWISE,
    "merakc.uniform.default": Shape("fresh"),
    "merakc.normal.default": Shape("fresh"),
}


def row_of(op: str) -> Row | None:
    """The row of an op; elementwise ops that torch tags so need none in the table."""
    if op in ROWS:
        return ROWS[op]
    if op.startswith("aten."):
        _, packet, overload = op.split(".")
        if torch.Tag.pointwise in getattr(getattr(torch.ops.aten, packet), overload).tags:
            return POINTWISE
    return None
