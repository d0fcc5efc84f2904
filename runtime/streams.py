"""What runs beside the computing of a rank, on a device whose host only issues work.

A GPU's host goes on at once: what it issues runs in order on a stream, and streams wait for each
other where they are told to. On a CPU there is nothing of that. Who wants to watch, or to check,
the calls that a GPU gets puts something else in the place of its streams.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

import torch

from merakc.kernels.host import bind_copies, unbind_copies

Mark = Any  # a torch.cuda.Event, or what a stand-in takes for one


class Work(Protocol):
    """What runs beside the computing: a collective, or a copy."""

    def wait(self) -> object:
        """The computing goes on once it has ended."""

    def is_completed(self) -> bool:
        """Whether it has ended, as far as the host knows."""


class Streams(Protocol):
    """The stream that computes, one aside, which reductions run on, and one for copies each way."""

    def aside(self) -> AbstractContextManager[None]:
        """What is issued inside runs aside, behind all that the computing has been given so far."""

    def mark(self) -> Mark:
        """The end of what runs aside so far."""

    def join(self, mark: Mark) -> None:
        """The computing goes on once a mark is reached; the host does at once."""

    def wait(self, mark: Mark) -> None:
        """The host waits until a mark is reached."""

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the host's on the device; the host does not wait for it."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, back: bool) -> Callable[[], None]:
        """Copies to the host or back, behind all that the computing has been given so far; what it
        returns lets the computing go on once the copy has ended.
        """


class CudaStreams:
    """Those of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.ways = [torch.cuda.Stream(device) for _ in range(2)]  # type: ignore[no-untyped-call]

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is issued inside runs aside, behind all that the computing has been given so far."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            yield

    def mark(self) -> Mark:
        """The end of what runs aside so far."""
        return self.stream.record_event()

    def join(self, mark: Mark) -> None:
        """The computing goes on once a mark is reached; the host does at once."""
        torch.cuda.current_stream(self.device).wait_event(mark)

    def wait(self, mark: Mark) -> None:
        """The host waits until a mark is reached."""
        mark.synchronize()

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the host's on the device; the host does not wait for it."""
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor, back: bool) -> Callable[[], None]:
        """Copies to the host or back, behind all that the computing has been given so far; what it
        returns lets the computing go on once the copy has ended.
        """
        stream = self.ways[back]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return partial(self.join, stream.record_event())


_kinds: dict[str, Callable[[torch.device], Streams]] = {"cuda": CudaStreams}
_made: dict[torch.device, Streams] = {}


def streams_of(device: torch.device) -> Streams | None:
    """The streams of a device; None where the host runs everything itself."""
    if device.type not in _kinds:
        return None
    if device not in _made:
        made = _made[device] = _kinds[device.type](device)
        bind_copies(device.type, lambda *given: made.copy(*given))
    return _made[device]


def bring(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on a device, for which the host does not wait."""
    streams = streams_of(device)
    return streams.bring(tensor) if streams and tensor.device.type == "cpu" else tensor.to(device)


def wait_for(device: torch.device) -> None:
    """The host waits until a device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def stand_in(kind: str, make: Callable[[torch.device], Streams]) -> Iterator[None]:
    """While it is entered, devices of a kind have these streams."""
    before = _kinds.get(kind)
    _kinds[kind] = make
    try:
        yield
    finally:
        del _kinds[kind]
        _made.clear()
        unbind_copies(kind)
        if before is not None:
            _kinds[kind] = before


class Running:
    """Collectives that run one after the other, beside the computing.

    What they are part of is a generator that yields each as it starts, and goes on when it has
    ended. Where there are `streams`, all are started at once, aside; elsewhere the next is as the
    last is found to have ended. `waited_s` is how long the host has stood still for them, ever.
    """

    def __init__(self, streams: Streams | None = None) -> None:
        self.waited_s, self.streams = 0.0, streams
        self.steps: Iterator[Work] = iter(())
        self.work: Work | None = None
        self.end: Mark = None  # of what runs aside
        self.read: list[torch.Tensor] = []  # aside, of the computing's memory

    def start(self, steps: Iterator[Work]) -> None:
        """Starts the first, once those before have ended."""
        self.finish()
        if self.streams is None:
            self.steps = steps
            self.work = next(steps, None)
            return
        with self.streams.aside():
            for work in steps:
                work.wait()
        self.end = self.streams.mark()

    def lend(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the computing's, to be read by what runs: its memory is not used again before
        the computing has waited for that.
        """
        if self.streams is not None:
            self.read.append(tensor)
        return tensor

    def finish(self) -> None:
        """Waits for all."""
        if self.end is not None:
            assert self.streams is not None
            self.streams.join(self.end)
            self.end = None
            self.read.clear()
        while self.work is not None:
            start_s = time.perf_counter()
            self.work.wait()
            self.waited_s += time.perf_counter() - start_s
            self.work = next(self.steps, None)

    def settle(self) -> None:
        """The host waits for all, too."""
        if self.end is not None:
            assert self.streams is not None
            self.streams.wait(self.end)
        self.finish()

    def poll(self) -> bool:
        """Goes on where the running one has ended; whether all have. What runs aside has when it
        is waited for.
        """
        while self.work is not None and self.work.is_completed():
            self.work.wait()
            self.work = next(self.steps, None)
        return self.work is None and self.end is None
