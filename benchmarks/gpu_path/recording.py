"""Training on CPU ranks as a GPU would run it: every call with the stream that it would get.

The runtime takes its way for devices with streams, which are only counted here (`Clocks`). gloo
does what NCCL would do, and its waits, which hold the host up, count as what they are on a GPU:
one stream waits for another.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu_path.clocks import ASIDE, COMPUTING, Clock, Clocks
from merakc.kernels import collectives
from merakc.runtime.executor import Step
from merakc.runtime.streams import stand_in
from merakc.train import model

# The calls of process groups, by which arguments they read and write: both, or the second and the
# first, or one of them.
BOTH = ("allreduce", "broadcast")
INTO = (
    "allgather", "_allgather_base", "all_gather_single", "alltoall_base", "all_to_all_single",
    "_reduce_scatter_base", "reduce_scatter_single",
)  # fmt: skip
MESSAGES = ("send", "recv")
# Ops that read of a tensor how large it is, and of which type.
_SHAPE_ALONE = re.compile(r"::new_|_like$")
Issued = tuple[tuple[int, ...], bool]  # the ranks of a communicator, and whether it is a message


class Recorder(TorchDispatchMode):
    """What one rank does, while it is `on`: its clocks, its calls, and in how many places of
    Programs its host waited for its device.

    `of_program` are the calls of the last step's Program. While it is `deaf`, waits count nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clocks = Clocks()
        self.on = self.deaf = self.in_program = False
        self.joins_computing = True  # whether what runs aside does
        self.issued: list[Issued] = []
        self.of_program: list[Issued] = []
        self.syncs = 0
        self.works: WeakKeyDictionary[Any, Clock] = WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts one call on the current stream."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not self.on or func.namespace == "c10d":
            return out
        clocks, schema = self.clocks, func._schema
        if func is torch.ops.aten._local_scalar_dense.default:
            self.syncs += self.in_program
            clocks.host |= clocks.streams[clocks.now]
        named = {a.name: a for a in schema.arguments}
        pairs = [*zip(schema.arguments, args, strict=False)]
        pairs += [(named[name], value) for name, value in kwargs.items()]
        reads, writes, given = [], [], set()
        for argument, value in pairs:
            tensors = [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]
            given |= {t.untyped_storage()._cdata for t in tensors}
            changed = argument.alias_info is not None and argument.alias_info.is_write
            (writes if changed else reads).extend(tensors)
        if _SHAPE_ALONE.search(schema.name):
            reads = []
        outs = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        made = [t for t in outs if t.untyped_storage()._cdata not in given]
        if outs and not made and not writes:
            return out  # a view
        writes += made
        clocks.run(clocks.now, str(func), reads, writes)
        return out

    # ------------------------------------------------------------------ streams

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is issued inside runs aside."""
        clocks, before = self.clocks, self.clocks.now
        if self.joins_computing:
            clocks.wait(ASIDE, clocks.streams[COMPUTING] | clocks.host)
        clocks.now = ASIDE
        try:
            yield
        finally:
            clocks.now = before

    def mark(self) -> Clock:
        """The end of what runs aside so far."""
        return Clock(self.clocks.streams[ASIDE])

    def join(self, mark: Clock) -> None:
        """The computing waits for a mark."""
        if not self.deaf:
            self.clocks.wait(self.clocks.now, mark)

    def wait(self, mark: Clock) -> None:
        """The host waits for a mark."""
        if not self.deaf:
            self.clocks.host |= mark

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the host has is there."""
        return tensor

    def copy(self, target: torch.Tensor, source: torch.Tensor, back: bool) -> Callable[[], None]:
        """A copy on the stream of its way, behind the computing."""
        before, self.on = self.on, False
        target.copy_(source)
        self.on = before
        if not before:
            return lambda: None
        name = "back" if back else "out"
        clock = self.clocks.issue(f"copy:{name}", name, [source], [target])

        def join() -> None:
            if not self.deaf:
                self.clocks.wait(self.clocks.now, clock)

        return join

    # ------------------------------------------------------------------ process groups

    def call(self, name: str, real: Callable[..., Any], group: Any, *args: Any, **more: Any) -> Any:
        """A call of a process group, on a stream of its own."""
        if not self.on:
            return real(group, *args, **more)
        found = [
            [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]
            for value in (*args, *more.values())
        ]
        first, second = [*(each for each in found if each), [], []][:2]
        reads = first if name in (*BOTH, "send") else second
        writes = first if name != "send" else []
        is_message = name in MESSAGES
        ranks = tuple(dist.get_process_group_ranks(group))
        self.issued.append((ranks, is_message))
        if self.in_program:
            self.of_program.append((ranks, is_message))
        stream = f"{'message' if is_message else 'collective'}:{group.group_name}"
        clock = self.clocks.issue(stream, name, reads, writes)
        if name == "send":  # gloo would hold what is sent; NCCL need not
            self.on = False
            args, self.on = ([t.clone() for t in first], *args[1:]), True
        work = real(group, *args, **more)
        if work is not None:
            self.works[work] = clock
        return work

    def waited(self, real: Callable[..., Any], work: Any, *args: Any) -> Any:
        """The current stream waits for a call."""
        clock = self.works.get(work)
        if clock is not None and not self.deaf:
            self.clocks.wait(self.clocks.now, clock)
        return real(work, *args)

    def asked(self, real: Callable[..., Any], work: Any) -> bool:
        """What has ended is known to the host from then on."""
        ended: bool = real(work)
        clock = self.works.get(work)
        if ended and clock is not None and not self.deaf:
            self.clocks.host |= clock
        return ended

    def unheard(self) -> AbstractContextManager[Any]:
        """Waits count nothing."""
        return patch.object(self, "deaf", True)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """While it is entered, CPU ranks take the way of devices with streams, and are recorded."""
        group, work = dist.ProcessGroup, dist.Work
        with ExitStack() as stack:
            stack.enter_context(stand_in("cpu", lambda _: self))
            for name in (*BOTH, *INTO, *MESSAGES):
                real = getattr(group, name)
                stack.enter_context(patch.object(group, name, _calling(self, name, real)))
            stack.enter_context(patch.object(collectives, "by_broadcasts", lambda _: False))
            stack.enter_context(patch.object(work, "wait", _bound(self.waited, work.wait)))
            asked = _bound(self.asked, work.is_completed)
            stack.enter_context(patch.object(work, "is_completed", asked))
            stack.enter_context(patch.object(Step, "run", self._stepping(Step.run)))
            everyone = self._silent(dist.all_gather_object)
            stack.enter_context(patch.object(dist, "all_gather_object", everyone))
            # A mode that changes what calls compute would be refused; this one does not.
            stack.enter_context(patch.object(model, "check_around", lambda _: None))
            yield

    @contextmanager
    def recording(self) -> Iterator[None]:
        """What runs inside is counted."""
        with patch.object(self, "on", True), self:
            yield

    def _stepping(self, real: Callable[..., None]) -> Callable[..., None]:
        def run(step: Step) -> None:
            self.of_program.clear()
            with patch.object(self, "in_program", True):
                real(step)

        return run

    def _silent(self, real: Callable[..., None]) -> Callable[..., None]:
        """Objects go between hosts, beside all streams."""

        def call(*args: Any, **more: Any) -> None:
            with patch.object(self, "on", False):
                real(*args, **more)

        return call


def _calling(recorder: Recorder, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda group, *args, **more: recorder.call(name, real, group, *args, **more)


def _bound(heard: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda work, *args: heard(real, work, *args)
