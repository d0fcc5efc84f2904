"""Products of groups of rows with a matrix each, `merakc::grouped_mm`, as experts compute them.

Legend of shapes: r rows, in the order of their groups; g groups; i and o width before and behind.
Group k is the rows `offs[k - 1]` to `offs[k]`; rows behind the last group give zeros.

torch's own op computes no float64, refuses tensors that are not aligned (a shard's width need not
be), and libraries call ops of theirs in its place where they are compiled. This one is for every
device and dtype; on CUDA it is torch's where that can be.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT_BYTES = 16  # of rows, which torch's kernel loads in vectors of that length


def _groups(offs: Tensor) -> Iterator[tuple[int, int, int]]:
    """Number, first and last row of every group that has rows."""
    start = 0
    for k, end in enumerate(offs.tolist()):
        if end > start:
            yield k, start, end
        start = end


def _forward(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """The rows [r, o] of x [r, i], w [g, i, o], offs [g]."""
    out = x.new_zeros((x.shape[0], w.shape[2]))
    for k, start, end in _groups(offs):
        torch.mm(x[start:end], w[k], out=out[start:end])
    return out


def _weights(x: Tensor, y: Tensor, offs: Tensor) -> Tensor:
    """The sum of the outer products of each group, [g, i, o], of x [r, i], y [r, o], offs [g]."""
    out = x.new_zeros((offs.shape[0], x.shape[1], y.shape[1]))
    for k, start, end in _groups(offs):
        torch.mm(x[start:end].T, y[start:end], out=out[k])
    return out


# CUDA


def _forward_cuda(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    if not (_aligned(x) and _aligned(w) and _aligned_width(w, w.shape[2])):
        return _forward(x, w, offs)
    out: Tensor = torch.ops.aten._grouped_mm(x, w, offs.int())
    return out.masked_fill_(_behind(out, offs), 0.0)


def _weights_cuda(x: Tensor, y: Tensor, offs: Tensor) -> Tensor:
    if not (_aligned(x) and _aligned(y)):
        return _weights(x, y, offs)
    out: Tensor = torch.ops.aten._grouped_mm(x.T, y, offs.int())
    return out


def _behind(out: Tensor, offs: Tensor) -> Tensor:
    """[r, 1], the rows behind the last group, which torch's kernel does not write."""
    return (torch.arange(out.shape[0], device=out.device) >= offs[-1]).unsqueeze(1)


def _aligned(x: Tensor) -> bool:
    """Whether torch's kernel takes a tensor: bfloat16, with one dim dense and the other aligned."""
    if x.dtype != torch.bfloat16 or x.data_ptr() % _ALIGNMENT_BYTES or not x.numel():
        return False
    *_, rows, columns = x.stride()
    leading = rows if columns == 1 else columns
    return 1 in (rows, columns) and _aligned_width(x, leading)


def _aligned_width(x: Tensor, width: int) -> bool:
    return width * x.element_size() % _ALIGNMENT_BYTES == 0


# Registration


def _fake(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    assert x.shape[1] == w.shape[1], (x.shape, w.shape)
    assert offs.shape[0] == w.shape[0], (offs.shape, w.shape)
    return x.new_empty((x.shape[0], w.shape[2]))


def _fake_weights(x: Tensor, y: Tensor, offs: Tensor) -> Tensor:
    return x.new_empty((offs.shape[0], x.shape[1], y.shape[1]))


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, w, offs = ctx.saved_tensors
    of_x = of_w = None
    if ctx.needs_input_grad[0]:
        of_x = torch.ops.merakc.grouped_mm(grad, w.transpose(1, 2), offs)
    if ctx.needs_input_grad[1]:
        of_w = torch.ops.merakc.grouped_mm_weights(x, grad, offs)
    return of_x, of_w, None


torch.library.define("merakc::grouped_mm", "(Tensor x, Tensor w, Tensor offs) -> Tensor")
torch.library.define("merakc::grouped_mm_weights", "(Tensor x, Tensor y, Tensor offs) -> Tensor")
torch.library.impl("merakc::grouped_mm", "default", _forward)
torch.library.impl("merakc::grouped_mm", "cuda", _forward_cuda)
torch.library.impl("merakc::grouped_mm_weights", "default", _weights)
torch.library.impl("merakc::grouped_mm_weights", "cuda", _weights_cuda)
torch.library.register_fake("merakc::grouped_mm", _fake)
torch.library.register_fake("merakc::grouped_mm_weights", _fake_weights)
torch.library.register_autograd("merakc::grouped_mm", _differentiate, setup_context=_save)
