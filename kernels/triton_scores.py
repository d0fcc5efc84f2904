"""Passes over a block of scores in Triton: one read for the forward, one pass in place back.

What `merakc.kernels.scores` does with a block in plain ops, sums in float32, without a copy of the
block in float32. To be imported where there is Triton, which reads the annotations of kernels.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 4096  # that a program holds at once
WARPS = 8


@triton.jit
def summed(
    scores: tl.tensor,
    labels: tl.tensor,
    total: tl.tensor,
    picked: tl.tensor,
    first: tl.tensor,
    wide: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One row of a block into its running logsumexp, and the score of its label."""
    row = tl.program_id(0).to(tl.int64)
    scores += row * wide
    lane = tl.arange(0, COLUMNS)
    tops = tl.full((COLUMNS,), -3.4028234663852886e38, tl.float32)
    sums = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, wide, COLUMNS):
        inside = start + lane < wide
        part = tl.load(scores + start + lane, mask=inside, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(tops, part)
        sums = sums * tl.exp(tops - higher) + tl.exp(part - higher)
        tops = higher
    top = tl.max(tops, 0)
    both = tl.maximum(tl.load(total + row), top)
    sums_all = tl.sum(sums * tl.exp(tops - top), 0)
    before = tl.exp(tl.load(total + row) - both)
    tl.store(total + row, both + tl.log(before + sums_all * tl.exp(top - both)))
    place = tl.load(labels + row) - first
    here = (place >= 0) & (place < wide)
    found = tl.load(scores + place, mask=here, other=0.0).to(tl.float32)
    tl.store(picked + row, tl.load(picked + row) + found)


@triton.jit
def gradients(
    scores: tl.tensor,
    labels: tl.tensor,
    total: tl.tensor,
    of_total: tl.tensor,
    of_picked: tl.tensor,
    first: tl.tensor,
    wide: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One row of a block, whose scores become their gradients."""
    row = tl.program_id(0).to(tl.int64)
    scores += row * wide
    lane = tl.arange(0, COLUMNS)
    norm, outer, own = tl.load(total + row), tl.load(of_total + row), tl.load(of_picked + row)
    place = tl.load(labels + row) - first
    for start in range(0, wide, COLUMNS):
        inside = start + lane < wide
        part = tl.load(scores + start + lane, mask=inside, other=float("-inf")).to(tl.float32)
        made = tl.exp(part - norm) * outer + tl.where(start + lane == place, own, 0.0)
        tl.store(scores + start + lane, made.to(scores.dtype.element_ty), mask=inside)


def add_block(scores: Tensor, labels: Tensor, total: Tensor, picked: Tensor, first: int) -> None:
    """Takes scores [n, c] of classes from `first` on into the logsumexp [n] of each row so far and
    the score [n] of its label.
    """
    n, wide = scores.shape
    summed[(n,)](scores, labels, total, picked, first, wide, COLUMNS=COLUMNS, num_warps=WARPS)


def to_gradients(scores: Tensor, read: Sequence[Tensor], first: int) -> None:
    """Puts the gradient of each score in its place: `read` are each row's label and logsumexp, and
    the gradients of that and of the label's score.
    """
    n, wide = scores.shape
    gradients[(n,)](scores, *read, first, wide, COLUMNS=COLUMNS, num_warps=WARPS)
