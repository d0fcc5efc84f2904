"""The two streams of a rank: computing, and communicating over dp in the order of posting."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

# What is done, from when, and until when.
Times = tuple[Any, float, float]


@dataclass(slots=True)
class _Running:
    """A collective that is posted, or a copy; `start_s` is negative until it is its turn."""

    key: Hashable
    left_s: float
    overlap: float
    start_s: float = -1.0


@dataclass(slots=True)
class Streams:
    """The clock of a rank whose collectives run beside its kernels, one after the other.

    While the rank computes, they run at the share `overlap` of their speed: collectives and kernels
    compete for multiprocessors and memory; those that do not have a share of their own. What is
    waited for is exposed. `ended` holds the key, the start and the end of each, in seconds since
    the start of the step, where it is `traced`, and `waits` those of each that was waited for.
    """

    overlap: float = 1.0
    traced: bool = True
    now_s: float = 0.0
    exposed_s: float = 0.0
    posted_s: float = 0.0
    queue: deque[_Running] = field(default_factory=deque)
    ended: list[Times] = field(default_factory=list)
    waits: list[Times] = field(default_factory=list)

    def post(self, key: Hashable, seconds: float, overlap: float | None = None) -> None:
        """Starts a collective of that many seconds behind those that run already, perhaps with a
        share of its own.
        """
        if seconds > 0:
            self.queue.append(_Running(key, seconds, self.overlap if overlap is None else overlap))
            self.posted_s += seconds

    def fall_behind(self, seconds: float) -> None:
        """Collectives that were posted before take so much longer."""
        if seconds > 0:
            self.queue.append(_Running(None, seconds, self.overlap))

    def compute(self, seconds: float) -> None:
        """Computes for so long."""
        self._pass(seconds, is_busy=True)

    def idle(self, seconds: float) -> None:
        """Waits so long for something else, with nothing in the way of collectives."""
        self._pass(seconds, is_busy=False)

    def wait(self, keys: Collection[Hashable] | None = None) -> None:
        """Waits until the collectives of these keys have ended, and those before them; for all,
        where None.
        """
        for _ in range(self._until(keys)):
            self._finish_first()

    def left_s(self, keys: Collection[Hashable] | None = None) -> float:
        """Seconds of that wait."""
        return sum(own.left_s for own in islice(self.queue, self._until(keys)))

    def _until(self, keys: Collection[Hashable] | None) -> int:
        """How many have to end for those of these keys to end."""
        for behind, own in enumerate(reversed(self.queue)):
            if keys is None or own.key in keys:
                return len(self.queue) - behind
        return 0

    def _finish_first(self) -> None:
        left_s = self.queue[0].left_s
        self.exposed_s += left_s
        if self.traced and self.queue[0].key is not None:
            self.waits.append((self.queue[0].key, self.now_s, self.now_s + left_s))
        self._end_first(self.now_s, self.now_s + left_s)
        self.now_s += left_s

    def _pass(self, seconds: float, *, is_busy: bool) -> None:
        at_s, self.now_s = self.now_s, self.now_s + seconds
        queue = self.queue
        while queue and at_s < self.now_s:
            first = queue[0]
            speed = first.overlap if is_busy else 1.0
            budget_s = (self.now_s - at_s) * speed
            if budget_s <= 0:
                return
            if first.start_s < 0:
                first.start_s = at_s
            if first.left_s > budget_s:
                first.left_s -= budget_s
                return
            end_s = min(at_s + first.left_s / speed, self.now_s)
            self._end_first(at_s, end_s)
            at_s = end_s

    def _end_first(self, at_s: float, end_s: float) -> None:
        first = self.queue.popleft()
        if self.traced:
            self.ended.append((first.key, first.start_s if first.start_s >= 0 else at_s, end_s))
