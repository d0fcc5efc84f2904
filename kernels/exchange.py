"""All-to-all: `merakc::exchange`, parts of one dim of a tensor for parts of another.

So a rank that has a block of a sequence, with all heads, comes to have the whole sequence of its
own heads, and back (DeepSpeed-Ulysses, arXiv 2309.14509, section 3.1). Backward: the exchange the
other way round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from merakc.kernels.collectives import Pending, _issue, axis_group


def exchange(
    x: Tensor, axis: str, dims: Sequence[int], whole: Sequence[int], parts: Sequence[int], rank: int
) -> Tensor:
    """All of dim `dims[0]`, of which rank k of the axis has `whole[k]`, and this rank's part of dim
    `dims[1]`, of which rank k is to have `parts[k]`.
    """
    out: Tensor = torch.ops.merakc.exchange(x, axis, dims, whole, parts, rank)
    return out


def start_exchange(
    x: Tensor, axis: str, dims: Sequence[int], whole: Sequence[int], parts: Sequence[int], rank: int
) -> Pending:
    """Starts what `merakc::exchange` computes."""
    joined, cut = dims
    assert x.shape[joined] == whole[rank], (x.shape, dims, whole, rank)
    assert x.shape[cut] == sum(parts), (x.shape, dims, parts)
    away = [_sized(x.shape, cut, size) for size in parts]
    here = [_sized(away[rank], joined, size) for size in whole]
    counts, sizes = ([math.prod(shape) for shape in shapes] for shapes in (away, here))
    sent, received = x.new_empty(sum(counts)), x.new_empty(sum(sizes))
    for block, part in zip(_blocks(sent, away), x.split_with_sizes(list(parts), cut), strict=True):
        block.copy_(part)

    def join() -> Tensor:
        return torch.cat(_blocks(received, here), joined)

    return start_all_to_all(axis, received, sent, sizes, counts, join)


def start_all_to_all(
    axis: str, out: Tensor, sent: Tensor, here: list[int], away: list[int],
    finish: Callable[[], Tensor],
) -> Pending:  # fmt: skip
    """Starts to send `away[k]` rows to each rank k of the axis, and to get `here[k]` from it."""
    group = axis_group(axis)

    def issue() -> Any:
        return dist.all_to_all_single(out, sent, here, away, group=group, async_op=True)

    work = _issue("all_to_all", axis, max(out.nbytes, sent.nbytes), issue)
    assert work is not None, "this rank is not in the group"
    return Pending(work, finish, sent)


def _blocks(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """What stands in a tensor, one behind the other."""
    parts = flat.split_with_sizes([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _sized(shape: Sequence[int], dim: int, size: int) -> list[int]:
    return [*shape[:dim], size, *shape[dim + 1 :]]


# Registration


def _fake(
    x: Tensor, axis: str, dims: Sequence[int], whole: Sequence[int], parts: Sequence[int], rank: int
) -> Tensor:
    joined, cut = dims
    return x.new_empty(_sized(_sized(x.shape, joined, sum(whole)), cut, parts[rank]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *ctx.rest = inputs


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    axis, (joined, cut), whole, parts, rank = ctx.rest
    back = exchange(grad, axis, (cut, joined), parts, whole, rank)
    return back, None, None, None, None, None


torch.library.define(
    "merakc::exchange",
    "(Tensor x, str axis, int[] dims, int[] whole, int[] parts, int rank) -> Tensor",
)
torch.library.impl("merakc::exchange", "default", lambda *args: start_exchange(*args).wait())
torch.library.register_fake("merakc::exchange", _fake)
torch.library.register_autograd("merakc::exchange", _differentiate, setup_context=_save)
