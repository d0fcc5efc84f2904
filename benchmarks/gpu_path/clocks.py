"""What happens before what on the streams of one rank: vector clocks.

Each stream counts what it runs, and knows how far it has waited for the others. Two accesses to the
same bytes, of which one writes, are a race where the later one's stream has not waited for the
earlier. Memory that is let go of is given out again by the stream that it was made on: what other
streams do with it must have been waited for by then.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch

Clock = Counter[str]
COMPUTING, ASIDE = "computing", "aside"


@dataclass(frozen=True, slots=True)
class Access:
    """Bytes from `start` to `stop` of a storage, touched by a stream at a time of its own."""

    stream: str
    time: int
    start: int
    stop: int
    writes: bool
    what: str


Tensors = Iterable[torch.Tensor]


class Clocks:
    """The streams of a rank. `now` is the one that gets what is issued."""

    def __init__(self) -> None:
        self.streams: dict[str, Clock] = {COMPUTING: Clock(), ASIDE: Clock()}
        self.host = Clock()  # what the host knows to have ended
        self.now = COMPUTING
        self.accesses: dict[int, list[Access]] = {}
        self.made_on: dict[int, str] = {}
        self.faults: Counter[str] = Counter()

    def run(self, stream: str, what: str, reads: Tensors = (), writes: Tensors = ()) -> Clock:
        """Something runs on a stream; the clock at its end."""
        clock = self.streams.setdefault(stream, Clock())
        clock |= self.host
        self.streams[stream] = clock
        clock[stream] += 1
        for tensor in reads:
            self._touch(stream, tensor, what, writes=False)
        for tensor in writes:
            self._touch(stream, tensor, what, writes=True)
        return Clock(clock)

    def issue(self, stream: str, what: str, reads: Tensors = (), writes: Tensors = ()) -> Clock:
        """The same, behind all that the current stream has been given."""
        self.wait(stream, self.streams[self.now])
        return self.run(stream, what, reads, writes)

    def wait(self, stream: str, clock: Clock) -> None:
        """A stream waits for what a clock counts."""
        self.streams[stream] = self.streams.get(stream, Clock()) | clock

    def _touch(self, stream: str, tensor: torch.Tensor, what: str, *, writes: bool) -> None:
        if not tensor.numel():
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.accesses:
            self.accesses[key], self.made_on[key] = [], self.now
            weakref.finalize(storage, self._let_go, key)
        start = tensor.storage_offset() * tensor.itemsize
        spans = zip(tensor.shape, tensor.stride(), strict=True)
        stop = start + (sum((n - 1) * s for n, s in spans) + 1) * tensor.itemsize
        clock, kept = self.streams[stream], []
        for a in self.accesses[key]:
            same = a.start < stop and start < a.stop and (a.writes or writes)
            if same and a.stream != stream and clock[a.stream] < a.time:
                verbs = ["writes" if each else "reads" for each in (writes, a.writes)]
                self.faults[f"{what} ({kind(stream)}) {verbs[0]} what {a.what} {verbs[1]}"] += 1
            covered = start <= a.start and a.stop <= stop
            if not (covered and (writes or (a.stream == stream and not a.writes))):
                kept.append(a)
        self.accesses[key] = [*kept, Access(stream, clock[stream], start, stop, writes, what)]

    def _let_go(self, key: int) -> None:
        owner = self.made_on.pop(key, COMPUTING)
        clock = self.streams[owner] | self.host
        for a in self.accesses.pop(key, ()):
            if a.stream != owner and clock[a.stream] < a.time:
                self.faults[f"let go of while {a.what} ({kind(a.stream)})"] += 1


def kind(stream: str) -> str:
    """A stream without what tells it from its like."""
    return stream.partition(":")[0]
