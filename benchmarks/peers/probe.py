"""A process group that hands everything to gloo, and can record, replay and leave out.

What trains on it is measured with its communication, and without: left out, a collective ends at
once, having filled its outputs with the rank's own input, so that arithmetic goes on with numbers
of the usual size. The collectives of a recorded step are replayed one after the other, with
nothing else going on. A call takes some microseconds of Python more than with gloo alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch._C._distributed_c10d import Store, _create_work_from_future  # type: ignore[attr-defined]
from torch.futures import Future

NAME = "probe"  # as a backend of torch.distributed


@dataclass(slots=True)
class Tape:
    """What the process groups of a rank do with collectives; `calls` are the recorded ones."""

    muted: bool = False
    recording: bool = False
    calls: list[tuple[Callable[..., dist.Work], tuple[Any, ...]]] = field(default_factory=list)

    def replay(self) -> None:
        """Runs the recorded collectives, each after the one before has ended."""
        for run, args in self.calls:
            run(*args).wait()

    @property
    def handed_bytes(self) -> int:
        """The bytes of all tensors that the recorded collectives were given."""
        tensors = [t for _, args in self.calls for t in pytree.tree_leaves(args)]
        return sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))


def install(tape: Tape) -> None:
    """Makes "probe" a backend of torch.distributed, whose groups obey the tape.

    Contestants that look for the backend's name are told that it is gloo; but while they are muted,
    lest what gloo is slow at is put together from collectives that leave nothing when left out.
    """

    def create(store: Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
        return Probe(store, rank, size, timeout, tape)

    dist.Backend.register_backend(NAME, create, devices=["cpu"])
    dist.get_backend = lambda group=None: dist.Backend(NAME if tape.muted else "gloo")


class Probe(dist.ProcessGroup):
    """One group. Whatever is not overridden below goes to gloo unseen."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, tape: Tape) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.tape = tape
        self.inner = dist.ProcessGroup(store, rank, size)
        kind = dist.ProcessGroup.BackendType.GLOO
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        for group in (self.inner, self):  # this one for its name alone
            group._register_backend(torch.device("cpu"), kind, gloo)
            group._set_default_backend(kind)

    def run(self, name: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> dist.Work:
        """A collective, as the tape wants it."""
        if self.tape.muted:
            outputs = _LOCAL[name](self, *args)
            future: Future[Any] = Future()
            future.set_result(outputs)
            return _create_work_from_future(future)  # type: ignore[no-any-return]
        collective = getattr(self.inner, name)
        if self.tape.recording:
            kept = pytree.tree_map_only(torch.Tensor, torch.zeros_like, args)
            self.tape.calls.append((partial(collective, **options), kept))
        work: dist.Work = collective(*args, **options)
        return work


def _in_place(group: Probe, tensors: Any = (), *_: Any) -> Any:
    return tensors


def _gather(group: Probe, out: torch.Tensor, own: torch.Tensor, *_: Any) -> Any:
    for part in out.view(-1).chunk(group.size()):
        if part.data_ptr() != own.data_ptr():  # `own` may be where it belongs already
            part.copy_(own.reshape(-1))
    return [out]


def _gather_list(group: Probe, outs: Any, owns: Any, *_: Any) -> Any:
    for parts, own in zip(outs, owns, strict=True):
        for part in parts:
            part.copy_(own)
    return outs


def _scatter(group: Probe, out: torch.Tensor, whole: torch.Tensor, *_: Any) -> Any:
    out.view(-1).copy_(whole.reshape(group.size(), -1)[group.rank()])
    return [out]


def _scatter_list(group: Probe, outs: Any, wholes: Any, *_: Any) -> Any:
    for out, parts in zip(outs, wholes, strict=True):
        out.copy_(parts[group.rank()])
    return outs


def _exchange(group: Probe, out: torch.Tensor, own: torch.Tensor, *_: Any) -> Any:
    out.copy_(own)
    return [out]


def _each(local: Callable[..., Any]) -> Callable[..., Any]:
    def run(group: Probe, outs: Any, owns: Any, *_: Any) -> Any:
        for out, own in zip(outs, owns, strict=True):
            local(group, out, own)
        return outs

    return run


_LOCAL: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("allreduce", "allreduce_coalesced", "broadcast", "reduce"), _in_place),
    "barrier": _in_place,
    **dict.fromkeys(("_allgather_base", "all_gather_single"), _gather),
    **dict.fromkeys(
        ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"), _each(_gather)
    ),
    "allgather": _gather_list,
    **dict.fromkeys(("_reduce_scatter_base", "reduce_scatter_single"), _scatter),
    **dict.fromkeys(
        ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"), _each(_scatter)
    ),
    "reduce_scatter": _scatter_list,
    **dict.fromkeys(("alltoall_base", "all_to_all_single"), _exchange),
}


def _override(name: str) -> None:
    def method(self: Probe, *args: Any, **options: Any) -> dist.Work:
        return self.run(name, args, options)

    if hasattr(dist.ProcessGroup, name):  # torch 2.13 renames some
        setattr(Probe, name, method)


for _name in _LOCAL:
    _override(_name)
