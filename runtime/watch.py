"""When the collectives of a rank's graphs really ran: issued, ended, waited for.

On a CPU the process group says when a collective has ended, in a thread of its own. On a GPU all
moments are events on streams: a wait holds up the stream that computes, and the end is noted on a
stream that waits for the collective alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from merakc.ir.program import CollectiveEvent

Moment = Any  # seconds of the host's clock, or a torch.cuda.Event


class Clock:
    """Moments since the start of a step: the host's, or those of a GPU's streams."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.on_streams = device is not None and device.type == "cuda"
        self.origin = self.now()

    def now(self) -> Moment:
        """This moment; on a GPU, of the current stream."""
        if not self.on_streams:
            return time.perf_counter()
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, moment: Moment) -> float:
        """Seconds from the start; on a GPU, once everything has ended."""
        if not self.on_streams:
            return float(moment - self.origin)
        moment.synchronize()
        return float(self.origin.elapsed_time(moment) / 1e3)


class TimedWork:
    """A collective under way, which notes when it ends and when it is waited for."""

    __slots__ = ("clock", "end", "issued", "named", "start", "wait_end", "wait_start", "work")

    def __init__(self, named: tuple[str, str, int], clock: Clock, issue: Callable[[], Any]) -> None:
        self.named, self.clock = named, clock
        self.end: Moment = None
        self.wait_start: Moment = None
        self.wait_end: Moment = None
        self.start = clock.now()
        self.work = issue()
        # Gloo's reduce-scatter of a list is made of others, and says nothing before it is waited
        # for: that is its end then.
        with suppress(RuntimeError):
            self.work.get_future().add_done_callback(self._ended)
        self.issued = clock.now()

    def _ended(self, _: object) -> None:
        self.end = self.clock.now()

    def wait(self) -> None:
        """Waits for the collective."""
        self.wait_start = self.clock.now()
        self.work.wait()
        self.wait_end = self.clock.now()
        self.work = None  # with the tensors that it holds

    def event(self, rank: int) -> CollectiveEvent:
        """Its times, once it has ended.

        One that nobody waited for was waited for at its end, or once it was issued where it ended
        before.
        """
        op, axis, size_bytes = self.named
        ended = next(m for m in (self.end, self.wait_end, self.issued) if m is not None)
        issued_s, end_s = self.clock.seconds(self.issued), self.clock.seconds(ended)
        wait_start_s = wait_end_s = max(issued_s, end_s)
        if self.wait_end is not None:
            wait_start_s, wait_end_s = map(self.clock.seconds, (self.wait_start, self.wait_end))
        return CollectiveEvent(
            rank, op, axis, size_bytes, start_s=self.clock.seconds(self.start), issued_s=issued_s,
            end_s=end_s, wait_start_s=wait_start_s, wait_end_s=wait_end_s,
        )  # fmt: skip


class Watch:
    """Notes every collective that it issues: a `merakc.kernels.collectives.Watcher`."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.works: list[TimedWork] = []

    def __call__(self, op: str, axis: str, size_bytes: int, issue: Callable[[], Any]) -> TimedWork:
        """Issues a collective."""
        self.works.append(TimedWork((op, axis, size_bytes), self.clock, issue))
        return self.works[-1]

    def events(self, rank: int) -> tuple[CollectiveEvent, ...]:
        """All of them, in the order in which they were issued, once they have ended."""
        return tuple(work.event(rank) for work in self.works)
