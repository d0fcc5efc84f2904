"""Ranks that share one GPU: what they exchange goes through the memory of their host, over gloo.

NCCL refuses two ranks on one device. All else of a step on several ranks, its kernels, its streams
and their waits, runs on one GPU as it would on several: so most of it can be checked where there is
one. Works do what NCCL's do: a wait orders streams, the current one behind the copy that it starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree

# Those of process groups, by what they write: all that they are given, or the first of it.
BOTH = ("allreduce", "broadcast")
INTO = (
    "allgather", "_allgather_base", "all_gather_single", "alltoall_base", "all_to_all_single",
    "_reduce_scatter_base", "reduce_scatter_single", "recv",
)  # fmt: skip
READ = ("send",)


class HostWork(dist.Work):
    """A call on copies, and the tensors that they are copied back to once somebody waits."""

    def __init__(self, work: dist.Work, back: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self.work, self.back = work, back

    def wait(self, *args: Any) -> bool:
        """The current stream goes on behind the copies."""
        self.work.wait(*args)
        for device, host in self.back:
            device.copy_(host)
        self.back = []
        return True

    def is_completed(self) -> bool:
        """Whether the hosts have exchanged."""
        return bool(self.work.is_completed())


def _tensors(values: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(values) if isinstance(x, torch.Tensor)]


def is_away(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on a device."""
    return tensor.is_cuda


def _on_copies(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(group: dist.ProcessGroup, *args: Any, **more: Any) -> Any:
        if not any(map(is_away, _tensors(args))):
            return real(group, *args, **more)
        # Behind what the current stream has been given.
        hosts = {id(x): x.to("cpu", copy=True) for x in _tensors(args)}
        given = pytree.tree_map_only(torch.Tensor, lambda x: hosts[id(x)], args)
        written = _tensors(args if name in BOTH else args[:1] if name in INTO else ())
        return HostWork(real(group, *given, **more), [(x, hosts[id(x)]) for x in written])

    return call


@contextmanager
def through_host() -> Iterator[None]:
    """While it is entered, process groups of gloo take CUDA tensors."""
    with ExitStack() as stack:
        for name in (*BOTH, *INTO, *READ):
            if (real := getattr(dist.ProcessGroup, name, None)) is not None:
                stack.enter_context(patch.object(dist.ProcessGroup, name, _on_copies(name, real)))
        yield
