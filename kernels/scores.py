"""Scores of many classes that are never whole: the product of rows with a row of weights for each
class, of which a cross-entropy reads two numbers a row.

`merakc::scores` gives the logsumexp of each row's scores and the score of its label. Both
directions go through the scores in blocks of classes: the backward computes each block again, so
that the gradient of a block of weights is one product over all rows, as it is of whole scores.

Legend of shapes: n rows, h width, c classes, those from `start` on of `vocab`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from merakc.kernels import gemm

# Where in a call's arguments the rows are; the weights follow.
PLACES = {
    "merakc.scores.default": 0, "composite.linear_cross_entropy": 0,
    "merakc.scores_backward.default": 2,
}  # fmt: skip
# And where it says whether products are oneDNN's.
ONEDNN_PLACES = {"merakc.scores.default": 7, "merakc.scores_backward.default": 8}
# Of a block: the most rows, and about its bytes in the dtype that sums are taken in.
ROWS, BLOCK_BYTES = 16384, 64 << 20


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """In what precision exponentials are summed: that of float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _block(rows: int, classes: int, dtype: torch.dtype, *, fused: bool = False) -> tuple[int, int]:
    """The rows and the classes of a block; of as many bytes in all where it is there once."""
    high = max(min(rows, ROWS), 1)
    sums = _sum_dtype(dtype)
    wide = BLOCK_BYTES // (high * sums.itemsize)
    if fused and dtype != sums:
        wide = wide * (sums.itemsize + dtype.itemsize) // dtype.itemsize
    return high, max(min(wide, classes), 1)


def _is_fused(x: Tensor) -> bool:
    """Whether kernels of ours go over the blocks."""
    return x.is_cuda and x.dtype != torch.float64 and has_triton()


@cache
def has_triton() -> bool:
    """Whether kernels can be compiled for GPUs."""
    return find_spec("triton") is not None


def working_bytes(
    shape: tuple[int, ...], classes: int, dtype: torch.dtype, *, backward: bool, onednn: bool
) -> int:
    """What the forward, or the backward, takes at once beside what it reads and gives, of rows of
    this shape, [n, h]. Of products that are added oneDNN makes a part at a time.
    """
    rows, width = shape
    high, wide = _block(rows, classes, dtype)
    sums = _sum_dtype(dtype)
    narrow = 0 if dtype == sums else dtype.itemsize
    block_bytes = high * wide * (sums.itemsize + narrow)
    sum_bytes = high * width * (sums.itemsize + narrow)
    product_bytes = min(max(high, wide) * width * dtype.itemsize, gemm.BLOCK_BYTES)
    return block_bytes + backward * (sum_bytes + onednn * product_bytes)


class _Blocks:
    """The scores of x [n, h] with w [c, h] and maybe a bias [c], block by block."""

    def __init__(
        self, x: Tensor, w: Tensor, bias: Tensor | None, labels: Tensor, start: int, onednn: bool
    ) -> None:
        self.x, self.w, self.bias, self.labels, self.start = x, w, bias, labels, start
        self.fused = _is_fused(x)
        self.high, self.wide = _block(len(x), len(w), x.dtype, fused=self.fused)
        self.linear = gemm.linear if onednn else F.linear

    def rows(self) -> Iterator[slice]:
        """The rows of blocks."""
        high = self.high
        yield from (slice(k, k + high) for k in range(0, len(self.x), high))

    def of(self, rows: slice) -> Iterator[tuple[slice, Tensor]]:
        """Of some rows, the classes of each block and its scores."""
        for k in range(0, len(self.w), self.wide):
            classes = slice(k, min(k + self.wide, len(self.w)))
            bias = None if self.bias is None else self.bias[classes]
            scores = self.linear(self.x[rows], self.w[classes], bias)
            if not self.fused:
                scores = scores.to(_sum_dtype(scores.dtype))
            yield classes, scores
            del scores  # before the next block is made; so do those who were given it

    def place(self, rows: slice, classes: slice) -> tuple[Tensor, Tensor]:
        """The place of each row's label in a block, and whether it is in it."""
        place, last = self.labels[rows] - (self.start + classes.start), classes.stop - classes.start
        here = (place >= 0) & (place < last)
        return place.clamp_(0, last - 1)[:, None], here


def scores(
    x: Tensor, w: Tensor, bias: Tensor | None, labels: Tensor, start: int, vocab: int,
    ignored: int, onednn: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The logsumexp [n] of the scores of each row, and the score [n] of its label: 0 where that is
    not among these classes.

    Labels are classes of the vocabulary or `ignored`; others raise `RuntimeError`.
    """
    valid = ((labels >= 0) & (labels < vocab)) | (labels == ignored)
    torch._assert_async(valid.all(), f"a label is none of {vocab} classes and not {ignored}")
    dtype = _sum_dtype(x.dtype)
    total = x.new_full((len(x),), -torch.inf, dtype=dtype)
    picked = x.new_zeros((len(x),), dtype=dtype)
    blocks = _Blocks(x, w, bias, labels, start, onednn)
    for rows in blocks.rows():
        for classes, part in blocks.of(rows):
            if blocks.fused:
                from merakc.kernels import triton_scores

                own = labels[rows], total[rows], picked[rows]
                triton_scores.add_block(part, *own, start + classes.start)
                del part
                continue
            place, here = blocks.place(rows, classes)
            picked[rows] += part.gather(1, place)[:, 0].masked_fill_(~here, 0)
            top = part.amax(1).clamp_(min=torch.finfo(dtype).min)  # of scores of -inf, too
            part.sub_(top[:, None]).exp_()
            total[rows] = torch.logaddexp(total[rows], part.sum(1).log_().add_(top))
            del part
    return total, picked


def scores_backward(
    of_total: Tensor, of_picked: Tensor, x: Tensor, w: Tensor, bias: Tensor | None, labels: Tensor,
    total: Tensor, start: int, onednn: bool, wanted_w: bool, wanted_x: bool, wanted_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of w, x and bias; empty ones of what is not wanted."""
    return add_scores_backward(
        None, False, of_total, of_picked, x, w, bias, labels, total, start, onednn,
        wanted_w, wanted_x, wanted_bias,
    )  # fmt: skip


def add_scores_backward(
    sum_w: Tensor | None, is_there: bool, of_total: Tensor, of_picked: Tensor, x: Tensor, w: Tensor,
    bias: Tensor | None, labels: Tensor, total: Tensor, start: int, onednn: bool,
    wanted_w: bool, wanted_x: bool, wanted_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The same with that of w added to a sum that is there, or written to one that is not yet."""
    dtype = total.dtype
    if sum_w is None:
        sum_w = w.new_empty(w.shape if wanted_w else (0,))
    found_x = x.new_empty(x.shape if wanted_x else (0,))
    found_bias = w.new_zeros((len(w) if wanted_bias else 0,), dtype=dtype)
    blocks = _Blocks(x, w, bias, labels, start, onednn)
    for rows in blocks.rows():
        sum_x = x.new_zeros(x[rows].shape if wanted_x else (0,), dtype=dtype)
        for classes, part in blocks.of(rows):
            if blocks.fused:
                from merakc.kernels import triton_scores

                read = [t[rows].contiguous() for t in (labels, total, of_total, of_picked)]
                triton_scores.to_gradients(part, read, start + classes.start)
            else:
                place, here = blocks.place(rows, classes)
                part.sub_(total[rows, None]).exp_().mul_(of_total[rows, None])
                part.scatter_add_(1, place, of_picked[rows].masked_fill(~here, 0)[:, None])
            if wanted_bias:
                found_bias[classes] += part.sum(0, dtype=dtype)
            narrow = part.to(x.dtype)
            if wanted_x and dtype == x.dtype:
                _add(sum_x, True, narrow, w[classes], onednn)
            elif wanted_x:
                sum_x += narrow @ w[classes]
            if wanted_w:
                _add(sum_w[classes], is_there or rows.start > 0, narrow.t(), x[rows], onednn)
            del part, narrow
        if wanted_x:
            found_x[rows] = sum_x
    return sum_w, found_x, found_bias.to(w.dtype)


def _add(total: Tensor, is_there: bool, left: Tensor, right: Tensor, onednn: bool) -> None:
    if onednn:
        gemm.add_mm(total, is_there, left, right)
    elif is_there:
        total.addmm_(left, right)
    else:
        torch.mm(left, right, out=total)


# Registration


def _fake(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    made = x.new_empty((x.shape[0],), dtype=_sum_dtype(x.dtype))
    return made, torch.empty_like(made)


def _fake_backward(
    of_total: Tensor, of_picked: Tensor, x: Tensor, w: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    wanted_w, wanted_x, wanted_bias = others[-3:]
    return (
        w.new_empty(w.shape if wanted_w else (0,)),
        x.new_empty(x.shape if wanted_x else (0,)),
        w.new_empty((w.shape[0] if wanted_bias else 0,)),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, w, bias, labels, ctx.start, _, _, ctx.onednn = inputs
    ctx.save_for_backward(x, w, bias, labels, output[0])


def _differentiate(ctx: Any, of_total: Tensor, of_picked: Tensor) -> tuple[Tensor | None, ...]:
    x, w, bias, labels, total = ctx.saved_tensors
    of_x, of_w, of_bias, *_ = ctx.needs_input_grad
    grads = torch.ops.merakc.scores_backward(
        of_total, of_picked, x, w, bias, labels, total, ctx.start, ctx.onednn, of_w, of_x, of_bias
    )
    found = [g if wanted else None for g, wanted in zip(grads, (of_w, of_x, of_bias), strict=True)]
    return found[1], found[0], found[2], None, None, None, None, None


torch.library.define(
    "merakc::scores",
    "(Tensor x, Tensor w, Tensor? bias, Tensor labels, int start, int vocab, int ignored,"
    " bool onednn) -> (Tensor, Tensor)",
)
torch.library.define(
    "merakc::scores_backward",
    "(Tensor of_total, Tensor of_picked, Tensor x, Tensor w, Tensor? bias, Tensor labels,"
    " Tensor total, int start, bool onednn, bool wanted_w, bool wanted_x, bool wanted_bias)"
    " -> (Tensor, Tensor, Tensor)",
)
torch.library.impl("merakc::scores", "default", scores)
torch.library.impl("merakc::scores_backward", "default", scores_backward)
torch.library.register_fake("merakc::scores", _fake)
torch.library.register_fake("merakc::scores_backward", _fake_backward)
torch.library.register_autograd("merakc::scores", _differentiate, setup_context=_save)
