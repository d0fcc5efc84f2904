"""What experts compute, `merakc::grouped_mm`, and how rows reach them, `dispatch` and `combine`.

Legend of shapes: r rows, in the order of their groups; g groups, of which rank k of an axis has
`experts[k]`; i and o width before and behind. Group k is the rows `offs[k - 1]` to `offs[k]`; rows
behind the last group give zeros.

torch's own product of groups computes no float64, refuses tensors that are not aligned (a shard's
width need not be), and libraries call ops of theirs in its place where they are compiled. This one
is for every device and dtype; on CUDA it is torch's where that can be.

Rows travel by all-to-all with parts of any size. `ends` are the `offs` of every rank, one behind
the other: each rank knows all counts beforehand. A rank sorts what it has received by expert, of
one expert by the rank that it came from: what is computed does not depend on who was first. Of
`dispatch` and `combine` each is the gradient of the other. How many rows a rank gets is known when
they come: `rows` says how many a plan counts with, and of `combine` how many come back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from merakc.kernels.collectives import Pending
from merakc.kernels.exchange import start_all_to_all

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


# Rows on their way

Counts = list[list[int]]  # rows by rank, and by expert


def dispatch(
    x: Tensor, ends: Tensor, axis: str, experts: Sequence[int], rank: int, rows: int
) -> Tensor:
    """The rows [r, d] of the experts of this rank, of every rank's x [n, d]."""
    out: Tensor = torch.ops.merakc.dispatch(x, ends, axis, experts, rank, rows)
    return out


def combine(
    y: Tensor, ends: Tensor, axis: str, experts: Sequence[int], rank: int, rows: int
) -> Tensor:
    """This rank's rows [n, d] of every rank's y [r, d], in the order in which they were sent; rows
    behind the last group are zeros.
    """
    out: Tensor = torch.ops.merakc.combine(y, ends, axis, experts, rank, rows)
    return out


def _counts(ends: Tensor, ranks: int) -> Counts:
    """The rows of each rank, [ranks][e], by expert."""
    before = ends.reshape(ranks, -1)
    return before.diff(dim=1, prepend=before.new_zeros(ranks, 1)).tolist()


def _own(experts: Sequence[int], rank: int) -> slice:
    """The experts of a rank."""
    first = sum(experts[:rank])
    return slice(first, first + experts[rank])


def _sizes(counts: Counts, experts: Sequence[int], rank: int) -> tuple[list[int], list[int]]:
    """Rows of this rank for each rank, and of each rank for this one."""
    out = [sum(counts[rank][_own(experts, k)]) for k in range(len(experts))]
    return out, [sum(own[_own(experts, rank)]) for own in counts]


def start_dispatch(
    x: Tensor, ends: Tensor, axis: str, experts: Sequence[int], rank: int, rows: int
) -> Pending:
    """Starts what `merakc::dispatch` computes."""
    counts = _counts(ends, len(experts))
    away, here = _sizes(counts, experts, rank)
    sent = x[: sum(away)].contiguous()
    received = x.new_empty((sum(here), *x.shape[1:]))
    parts = [own[_own(experts, rank)] for own in counts]

    def by_expert() -> Tensor:
        return _transposed(received, parts)

    return start_all_to_all(axis, received, sent, here, away, by_expert)


def start_combine(
    y: Tensor, ends: Tensor, axis: str, experts: Sequence[int], rank: int, rows: int
) -> Pending:
    """Starts what `merakc::combine` computes."""
    counts = _counts(ends, len(experts))
    here, away = _sizes(counts, experts, rank)
    assert y.shape[0] == sum(away), (y.shape, away)
    parts = [own[_own(experts, rank)] for own in counts]
    sent = _transposed(y, [list(own) for own in zip(*parts, strict=True)])
    out = y.new_empty((rows, *y.shape[1:]))
    out[sum(here) :] = 0

    return start_all_to_all(axis, out[: sum(here)], sent, here, away, lambda: out)


def _transposed(x: Tensor, parts: Counts) -> Tensor:
    """Rows in parts [a][b], one behind the other, as parts [b][a]."""
    flat = torch.split(x, [n for row in parts for n in row])
    width = len(parts[0])
    order = [flat[a * width + b] for b in range(width) for a in range(len(parts))]
    return torch.cat(order) if order else x


def _own_ends(ends: Tensor, experts: Sequence[int], rank: int) -> Tensor:
    counts = ends.reshape(len(experts), -1)
    each = counts.diff(dim=1, prepend=counts.new_zeros(len(experts), 1)).sum(0)
    return each[_own(experts, rank)].cumsum(0, dtype=ends.dtype)


def _unslice(grad: Tensor, dim: int, size: int, start: int, end: int, step: int) -> Tensor:
    """What `aten.slice_backward` gives, of `size` elements in a dim; the other dims are as long as
    those of `grad`, which may have other numbers of rows each time.
    """
    shape = [*grad.shape]
    shape[dim] = size
    return torch.ops.aten.slice_backward(grad, shape, dim, start, end, step)  # type: ignore[no-any-return]


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


def _save_sent(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ends, *ctx.rest = inputs
    ctx.rows = x.shape[0]
    ctx.save_for_backward(ends)


def _conjugate(op: Callable[..., Tensor]) -> Callable[[Any, Tensor], tuple[Tensor | None, ...]]:
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (ends,) = ctx.saved_tensors
        return op(grad, ends, *ctx.rest[:3], ctx.rows), None, None, None, None, None

    return backward


for _name, _start, _backward in (
    ("dispatch", start_dispatch, combine),
    ("combine", start_combine, dispatch),
):
    torch.library.define(
        f"merakc::{_name}",
        "(Tensor x, Tensor ends, str axis, int[] experts, int rank, int rows) -> Tensor",
    )
    torch.library.impl(
        f"merakc::{_name}", "default", lambda *args, start=_start: start(*args).wait()
    )
    torch.library.register_fake(
        f"merakc::{_name}",
        lambda x, ends, axis, experts, rank, rows: x.new_empty(rows, *x.shape[1:]),
    )
    torch.library.register_autograd(
        f"merakc::{_name}", _conjugate(_backward), setup_context=_save_sent
    )

torch.library.define("merakc::own_ends", "(Tensor ends, int[] experts, int rank) -> Tensor")
torch.library.impl("merakc::own_ends", "default", _own_ends)
torch.library.register_fake(
    "merakc::own_ends", lambda ends, experts, rank: ends.new_empty(experts[rank])
)

torch.library.define(
    "merakc::unslice", "(Tensor grad, int dim, int size, int start, int end, int step) -> Tensor"
)
torch.library.impl("merakc::unslice", "default", _unslice)
torch.library.register_fake("merakc::unslice", _unslice)
