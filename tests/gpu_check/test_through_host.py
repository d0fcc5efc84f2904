"""Calls of process groups on copies, here of tensors that are on the CPU already."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.ranks import run_ranks
from merakc.gpu_check import through_host as module
from merakc.gpu_check.through_host import HostWork, through_host


def _calls() -> list[list[float]]:
    module.is_away = lambda _: True
    rank = dist.get_rank()
    with through_host():
        summed, given = torch.full((2,), rank + 1.0), torch.full((2,), 7.0 * rank)
        work = dist.all_reduce(summed, async_op=True)
        assert isinstance(work, HostWork)
        before = summed.tolist()
        work.wait()
        dist.broadcast(given, 1)
        every = [torch.zeros(1) for _ in range(2)]
        dist.all_gather(every, torch.full((1,), rank + 5.0))
        parts = torch.zeros(2)
        dist.all_to_all_single(parts, torch.tensor([10.0 * rank, 10.0 * rank + 1]))
        message = torch.full((1,), 3.0 if rank else 0.0)
        sent = dist.isend(message, 0) if rank else dist.irecv(message, 1)
        assert sent is not None
        sent.wait()
    return [before, summed.tolist(), given.tolist(), [float(t) for t in every], parts.tolist(),
            message.tolist()]  # fmt: skip


def test_ranks_exchange_what_they_would_on_devices() -> None:
    first, second = run_ranks(2, _calls)
    assert first == [[1, 1], [3, 3], [7, 7], [5, 6], [0, 10], [3]]
    assert second == [[2, 2], [3, 3], [7, 7], [5, 6], [1, 11], [3]]


def test_tensors_of_the_host_go_as_they_are() -> None:
    def run() -> bool:
        with through_host():
            own = torch.ones(1)
            work = dist.all_reduce(own, async_op=True)
            assert work is not None
            work.wait()
            return not isinstance(work, HostWork) and own.item() == 2.0

    assert run_ranks(2, run) == [True, True]
