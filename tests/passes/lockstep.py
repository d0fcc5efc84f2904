"""Runs the graphs of all tp ranks in one process: a thread a rank, collectives through barriers.

It needs no process group, so that a sharded graph is checked as quickly as a plain one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor

from merakc.kernels.collectives import bind_axis, unbind_axes

T = TypeVar("T")
TIMEOUT_S = 60.0


class _Done:
    def wait(self) -> None:
        """Nothing is under way."""


class ThreadGroup:
    """What the collectives ask of a process group, among the threads of one process."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._own = threading.local()
        self._slots: list[Tensor] = [torch.empty(0)] * size
        self._barrier = threading.Barrier(size, timeout=TIMEOUT_S)

    def enter(self, rank: int) -> None:
        """Makes the calling thread rank `rank`."""
        self._own.rank = rank

    def abort(self) -> None:
        """Lets the others fail where one has."""
        self._barrier.abort()

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        rank: int = self._own.rank
        return rank

    def exchange(self, value: Tensor) -> list[Tensor]:
        """Every rank's value."""
        self._slots[self.rank()] = value.detach().clone()
        self._barrier.wait()
        found = list(self._slots)
        self._barrier.wait()
        return found

    def allreduce(self, tensors: list[Tensor], options: Any) -> _Done:
        values = torch.stack(self.exchange(tensors[0]))
        summed = options.reduceOp == torch.distributed.ReduceOp.SUM
        tensors[0].copy_(values.sum(0) if summed else values.amax(0))
        return _Done()


def _all_to_all(out: Tensor, blocks: Tensor, group: ThreadGroup, *, async_op: bool) -> _Done:
    assert async_op
    out.copy_(torch.stack([given[group.rank()] for given in group.exchange(blocks)]))
    return _Done()


def _broadcast(value: Tensor, *, group: ThreadGroup, group_src: int, async_op: bool) -> _Done:
    assert async_op
    value.copy_(group.exchange(value)[group_src])
    return _Done()


@contextmanager
def _bound(group: ThreadGroup) -> Iterator[None]:
    bind_axis("tp", group)  # type: ignore[arg-type]
    try:
        with (
            mock.patch("torch.distributed.broadcast", _broadcast),
            mock.patch("torch.distributed.all_to_all_single", _all_to_all),
            mock.patch("torch.distributed.get_backend", return_value="gloo"),
        ):
            yield
    finally:
        unbind_axes()


def in_lockstep(tp: int, function: Callable[[int], T]) -> list[T]:
    """`function(rank)` of every tp rank, at the same time, with collectives over "tp" among them.

    Raises the first rank's own error.
    """
    group = ThreadGroup(tp)

    def run(rank: int) -> T:
        group.enter(rank)
        try:
            return function(rank)
        except BaseException:
            group.abort()
            raise

    with _bound(group), ThreadPoolExecutor(tp) as pool:
        futures = [pool.submit(run, rank) for rank in range(tp)]
        errors = [f.exception() for f in futures]
        broken = [e for e in errors if e is not None]
        own = [e for e in broken if not isinstance(e, threading.BrokenBarrierError)]
        for error in (own or broken)[:1]:
            raise error
        return [f.result() for f in futures]


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """The largest difference over the largest value, of two tensors of one shape; over 1e-5 where
    all are smaller, as where a key's bias changes nothing and its gradient is rounding alone.
    """
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    if not wanted.numel():
        return 0.0
    scale = max(wanted.abs().max().item(), 1e-5)
    return (found - wanted).abs().max().item() / scale


def same_shapes(found: Sequence[Tensor], wanted: Sequence[tuple[int, ...]]) -> bool:
    """Whether tensors have these shapes."""
    return [tuple(t.shape) for t in found] == list(wanted)
