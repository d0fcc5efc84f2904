"""Collectives over mesh axes, as functional ops whose autograd is their conjugate.

`merakc::copy_to` and `merakc::all_reduce` are f and g of Megatron-LM (arXiv 1909.08053, section 3):
f is the identity forward and an all-reduce backward, at the entry of a region where ranks hold
different parts; g the reverse, at its exit. Sequence parallelism (arXiv 2205.05198, section 4.2)
splits what lies between an exit and the next entry: `merakc::reduce_scatter` and
`merakc::gather_to` are the same exit and entry from and to parts. `merakc::all_gather` and
`merakc::scatter` have computations on the whole side that are alike on every rank, so that nothing
is added up in either direction.

An axis is a name that the runtime binds to a process group. Tracing on fake tensors needs none.
All results are new and contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from merakc.errors import ConfigError

# What is told of a collective: its op, its axis, the bytes of its tensor, and how it is issued.
Watcher = Callable[[str, str, int, Callable[[], Any]], Any]

AXES = ("cp", "tp")  # over which the collectives of graphs run
_groups: dict[str, dist.ProcessGroup] = {}
_watchers: list[Watcher] = []
_REDUCE_OPS = {
    "sum": dist.ReduceOp(dist.ReduceOp.SUM),
    "max": dist.ReduceOp(dist.ReduceOp.MAX),
}
# By their newer names, where torch has them: the older ones warn there.
scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def bind_axis(axis: str, group: dist.ProcessGroup) -> None:
    """Lets the collectives over `axis` run on `group`; a second call replaces the first."""
    _groups[axis] = group


def axis_group(axis: str) -> dist.ProcessGroup:
    """The process group of `axis`. Raises `ConfigError` if none is bound."""
    try:
        return _groups[axis]
    except KeyError:
        bound = ", ".join(sorted(_groups)) or "none"
        raise ConfigError(
            f"a collective over mesh axis '{axis}' has no process group (bound axes: {bound}); "
            f"call bind_axis('{axis}', group) on every rank first"
        ) from None


def unbind_axes() -> None:
    """Forgets every binding."""
    _groups.clear()


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Lets `watcher` issue every collective, and return the work that is waited for."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def _issue(op: str, axis: str, size_bytes: int, issue: Callable[[], Any]) -> Any:
    return _watchers[-1](op, axis, size_bytes, issue) if _watchers else issue()


def all_reduce(x: Tensor, axis: str, reduce: str = "sum") -> Tensor:
    """The sum or maximum of every rank's x. Backward: the identity for 'sum', none for 'max'."""
    out: Tensor = torch.ops.merakc.all_reduce(x, axis, reduce)
    return out


def copy_to(x: Tensor, axis: str) -> Tensor:
    """A copy of x, which all ranks hold alike; backward: the sum of every rank's gradient."""
    out: Tensor = torch.ops.merakc.copy_to(x, axis)
    return out


def all_gather(x: Tensor, axis: str, dim: int, sizes: Sequence[int], rank: int) -> Tensor:
    """Every rank's x, concatenated along `dim`; backward: this rank's slice of the gradient.

    `sizes[i]` is the size of `dim` on rank i of the axis, `rank` this rank's place on it.
    """
    out: Tensor = torch.ops.merakc.all_gather(x, axis, dim, sizes, rank)
    return out


def gather_to(x: Tensor, axis: str, dim: int, sizes: Sequence[int], rank: int) -> Tensor:
    """Like `all_gather`, for ranks that go on with different parts; backward: `reduce_scatter`."""
    out: Tensor = torch.ops.merakc.gather_to(x, axis, dim, sizes, rank)
    return out


def reduce_scatter(x: Tensor, axis: str, dim: int, sizes: Sequence[int], rank: int) -> Tensor:
    """This rank's slice along `dim` of the sum of every rank's x; backward: `all_gather`."""
    out: Tensor = torch.ops.merakc.reduce_scatter(x, axis, dim, sizes, rank)
    return out


def scatter(x: Tensor, axis: str, dim: int, sizes: Sequence[int], rank: int) -> Tensor:
    """This rank's slice of x, which all ranks hold alike; backward: `all_gather`."""
    out: Tensor = torch.ops.merakc.scatter(x, axis, dim, sizes, rank)
    return out


def all_reduce_now(x: Tensor, axis: str, reduce: str) -> Tensor:
    """What `merakc::all_reduce` computes, past the dispatcher and autograd."""
    return start_all_reduce(x, axis, reduce).wait()


def all_reduce_over(x: Tensor, axis: str, reduce: str) -> Tensor:
    """The same, written over x where that is contiguous."""
    return _start_all_reduce(x if x.is_contiguous() else _contiguous_copy(x), axis, reduce).wait()


class Pending:
    """A collective that is under way; `held` is what the process group still reads.

    On a GPU a wait holds up the stream of the caller, not the caller.
    """

    __slots__ = ("_finish", "_held", "_work")

    def __init__(
        self,
        work: dist.Work | _Works,
        finish: Callable[[], Tensor],
        *held: Tensor | Sequence[Tensor],
    ) -> None:
        self._work, self._finish, self._held = work, finish, held

    def wait(self) -> Tensor:
        """The result, once it is there."""
        self._work.wait()
        return self._finish()


class _Works:
    """Collectives that are waited for as one."""

    __slots__ = ("_works",)

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Waits for all."""
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        """Whether all have ended."""
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> torch.futures.Future[list[torch.futures.Future[Any]]]:
        """What comes once all have ended."""
        return torch.futures.collect_all([work.get_future() for work in self._works])


def by_broadcasts(group: dist.ProcessGroup) -> bool:
    """Whether parts are gathered by broadcasts."""
    return dist.get_backend(group) == "gloo"


def gather_into(whole: Tensor, own: Tensor, group: dist.ProcessGroup) -> dist.Work | _Works:
    """Starts to fill the contiguous `whole` with the parts of the group's ranks, all of one size;
    `own` may be a view of it.

    On gloo each rank broadcasts its part: 32 MiB over two ranks of one machine take 7 ms where its
    own gather takes 28, over four ranks on two cores 21 and 50, and 32 KiB there 1.6 and 3.8.
    """
    if not by_broadcasts(group):
        flat = whole.view(-1), own.reshape(-1)
        work: dist.Work | None = _gather_single(*flat, group=group, async_op=True)
        assert work is not None, "this rank is not in the group"
        return work
    parts = whole.view(group.size(), whole.numel() // group.size())
    mine = parts[group.rank()]
    if mine.data_ptr() != own.data_ptr():
        mine.copy_(own.reshape(-1))
    sent = [dist.broadcast(p, group=group, group_src=k, async_op=True) for k, p in enumerate(parts)]
    return _Works([work for work in sent if work is not None])


def wait(pending: Pending) -> Tensor:
    """The result of a collective that was started."""
    return pending.wait()


def start_all_reduce(x: Tensor, axis: str, reduce: str) -> Pending:
    """Starts what `merakc::all_reduce` computes."""
    return _start_all_reduce(_contiguous_copy(x), axis, reduce)


def _start_all_reduce(out: Tensor, axis: str, reduce: str) -> Pending:
    group = axis_group(axis)
    options = dist.AllreduceOptions()
    options.reduceOp = _REDUCE_OPS[reduce]
    work = _issue("all_reduce", axis, out.nbytes, lambda: group.allreduce([out], options))
    return Pending(work, lambda: out)


def _contiguous_copy(x: Tensor) -> Tensor:
    """A new tensor, contiguous even in the strides of its dims of size 1."""
    return x.new_empty(x.shape).copy_(x)


def _copy_to(x: Tensor, axis: str) -> Tensor:
    return _contiguous_copy(x)


def _divide_gradient(x: Tensor, ranks: int) -> Tensor:
    """A copy of x, of which so many ranks make the same gradient; backward: one rank's share."""
    return _contiguous_copy(x)


def start_all_gather(x: Tensor, axis: str, dim: int, sizes: Sequence[int], rank: int) -> Pending:
    """Starts what `merakc::all_gather` and `merakc::gather_to` compute."""
    group = axis_group(axis)
    assert len(sizes) == group.size(), (sizes, group.size())
    assert rank == group.rank(), (rank, group.rank())
    assert x.shape[dim] == sizes[rank], (x.shape, dim, sizes, rank)
    # Process groups gather blocks of one size: pad to the largest.
    even, dim = len(set(sizes)) == 1, dim % x.dim()
    block = list(x.shape)
    block[dim] = max(sizes)
    own = x.contiguous() if even else x.new_zeros(block)
    if not even:
        own.narrow(dim, 0, sizes[rank]).copy_(x)
    blocks = x.new_empty((len(sizes), *block))
    work = _issue("all_gather", axis, blocks.nbytes, lambda: gather_into(blocks, own, group))
    block[dim] = sum(sizes)

    def join() -> Tensor:
        if even:
            # Of one element each, `reshape` gives a view: graphs are recorded for a whole tensor.
            return blocks.movedim(0, dim).reshape(block).contiguous()
        trimmed = [part.narrow(dim, 0, size) for part, size in zip(blocks, sizes, strict=True)]
        return torch.cat(trimmed, dim, out=x.new_empty(block))

    return Pending(work, join, own)


def _all_gather(x: Tensor, axis: str, dim: int, sizes: Sequence[int], rank: int) -> Tensor:
    return start_all_gather(x, axis, dim, sizes, rank).wait()


def start_reduce_scatter(
    x: Tensor, axis: str, dim: int, sizes: Sequence[int], rank: int
) -> Pending:
    """Starts what `merakc::reduce_scatter` computes."""
    group = axis_group(axis)
    assert len(sizes) == group.size(), (sizes, group.size())
    assert x.shape[dim] == sum(sizes), (x.shape, dim, sizes)
    even, dim = len(set(sizes)) == 1, dim % x.dim()
    block = list(x.shape)
    block[dim] = max(sizes)
    if even:  # without a copy where the dim is the first that is more than one
        apart = (*x.shape[:dim], len(sizes), sizes[0], *x.shape[dim + 1 :])
        blocks = x.reshape(apart).movedim(dim, 0).contiguous()
    else:
        blocks = x.new_zeros((len(sizes), *block))
        for own, part in zip(blocks, torch.split(x, list(sizes), dim), strict=True):
            own.narrow(dim, 0, part.shape[dim]).copy_(part)
    # Gloo's own is an all-reduce, of twice the bytes: ranks exchange parts and add them up.
    adds = dist.get_backend(group) == "gloo"
    out = torch.empty_like(blocks) if adds else x.new_empty(block)
    call = dist.all_to_all_single if adds else scatter_single
    work = _issue("reduce_scatter", axis, blocks.nbytes,
                  lambda: call(out, blocks, group=group, async_op=True))  # fmt: skip
    assert work is not None, "this rank is not in the group"

    def take() -> Tensor:
        whole = out.sum(0, dtype=x.dtype) if adds else out
        return whole if even else _contiguous_copy(whole.narrow(dim, 0, sizes[rank]))

    return Pending(work, take, blocks)


def _reduce_scatter(x: Tensor, axis: str, dim: int, sizes: Sequence[int], rank: int) -> Tensor:
    return start_reduce_scatter(x, axis, dim, sizes, rank).wait()


def _scatter(x: Tensor, axis: str, dim: int, sizes: Sequence[int], rank: int) -> Tensor:
    return _contiguous_copy(x.narrow(dim, sum(sizes[:rank]), sizes[rank]))


# Registration


def _fake_same(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _fake_all_gather(x: Tensor, axis: str, dim: int, sizes: Sequence[int], rank: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = sum(sizes)
    return x.new_empty(shape)


def _fake_part(x: Tensor, axis: str, dim: int, sizes: Sequence[int], rank: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = sizes[rank]
    return x.new_empty(shape)


def _save_all_reduce(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.reduce = inputs[2]


def _differentiate_all_reduce(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    if ctx.reduce != "sum":
        raise NotImplementedError(f"merakc::all_reduce of '{ctx.reduce}' has no gradient: detach")
    return grad, None, None


def _save_copy_to(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.axis = inputs[1]


def _differentiate_copy_to(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return all_reduce(grad, ctx.axis), None


def _save_divide_gradient(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.ranks = inputs[1]


def _differentiate_divide_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return grad / ctx.ranks, None


def _save_rest(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.rest = inputs[1:]


def _conjugate(
    op: Callable[[Tensor, str, int, Sequence[int], int], Tensor],
) -> Callable[[Any, Tensor], tuple[Tensor | None, ...]]:
    return lambda ctx, grad: (op(grad, *ctx.rest), None, None, None, None)


torch.library.define("merakc::all_reduce", "(Tensor x, str axis, str reduce) -> Tensor")
torch.library.impl("merakc::all_reduce", "default", all_reduce_now)
torch.library.register_fake("merakc::all_reduce", _fake_same)
torch.library.register_autograd(
    "merakc::all_reduce", _differentiate_all_reduce, setup_context=_save_all_reduce
)

torch.library.define("merakc::copy_to", "(Tensor x, str axis) -> Tensor")
torch.library.impl("merakc::copy_to", "default", _copy_to)
torch.library.register_fake("merakc::copy_to", _fake_same)
torch.library.register_autograd(
    "merakc::copy_to", _differentiate_copy_to, setup_context=_save_copy_to
)

torch.library.define("merakc::divide_gradient", "(Tensor x, int ranks) -> Tensor")
torch.library.impl("merakc::divide_gradient", "default", _divide_gradient)
torch.library.register_fake("merakc::divide_gradient", _fake_same)
torch.library.register_autograd(
    "merakc::divide_gradient", _differentiate_divide_gradient,
    setup_context=_save_divide_gradient,
)  # fmt: skip

for _name, _run, _fake, _backward in (
    ("all_gather", _all_gather, _fake_all_gather, scatter),
    ("gather_to", _all_gather, _fake_all_gather, reduce_scatter),
    ("reduce_scatter", _reduce_scatter, _fake_part, all_gather),
    ("scatter", _scatter, _fake_part, all_gather),
):
    torch.library.define(
        f"merakc::{_name}", "(Tensor x, str axis, int dim, int[] sizes, int rank) -> Tensor"
    )
    torch.library.impl(f"merakc::{_name}", "default", _run)
    torch.library.register_fake(f"merakc::{_name}", _fake)
    torch.library.register_autograd(
        f"merakc::{_name}", _conjugate(_backward), setup_context=_save_rest
    )
