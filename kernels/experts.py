"""Rows that are sent to the ranks that have their experts, and back: `merakc::dispatch`, `combine`.

Legend of shapes: n rows of a rank, sorted by expert; r rows that it computes; e experts, of which
rank k of an axis has `experts[k]`, in order; d width. `ends` are the ends of the groups of every
rank's rows, one rank behind the other, [ranks * e]: each rank knows all counts beforehand.

Rows travel by all-to-all with parts of any size. A rank sorts what it has received by expert, of
one expert by the rank that it came from: what is computed does not depend on who was first.
The conjugate of each is the other one. How many rows a rank gets is known when they come: `rows`
says how many a plan counts with, of `combine` exactly how many come back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from merakc.kernels.collectives import Pending, _issue, axis_group

Counts = list[list[int]]


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

    return _exchange(axis, received, sent, here, away, by_expert)


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

    return _exchange(axis, out[: sum(here)], sent, here, away, lambda: out)


def _transposed(x: Tensor, parts: Counts) -> Tensor:
    """Rows in parts [a][b], one behind the other, as parts [b][a]."""
    flat = torch.split(x, [n for row in parts for n in row])
    width = len(parts[0])
    order = [flat[a * width + b] for b in range(width) for a in range(len(parts))]
    return torch.cat(order) if order else x


def _exchange(
    axis: str, out: Tensor, sent: Tensor, here: list[int], away: list[int],
    finish: Callable[[], Tensor],
) -> Pending:  # fmt: skip
    group = axis_group(axis)

    def issue() -> Any:
        return dist.all_to_all_single(out, sent, here, away, group=group, async_op=True)

    work = _issue("all_to_all", axis, max(out.nbytes, sent.nbytes), issue)
    assert work is not None, "this rank is not in the group"
    return Pending(work, finish, sent)


def _own_ends(ends: Tensor, experts: Sequence[int], rank: int) -> Tensor:
    counts = ends.reshape(len(experts), -1)
    each = counts.diff(dim=1, prepend=counts.new_zeros(len(experts), 1)).sum(0)
    return each[_own(experts, rank)].cumsum(0, dtype=ends.dtype)


# Registration


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
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
    torch.library.register_autograd(f"merakc::{_name}", _conjugate(_backward), setup_context=_save)

torch.library.define("merakc::own_ends", "(Tensor ends, int[] experts, int rank) -> Tensor")
torch.library.impl("merakc::own_ends", "default", _own_ends)
torch.library.register_fake(
    "merakc::own_ends", lambda ends, experts, rank: ends.new_empty(experts[rank])
)
