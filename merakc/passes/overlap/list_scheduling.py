"""A list scheduler for two resources: a device that computes and a link that communicates.

Graham's (Bell System Technical Journal 45, 1966; SIAM J. Appl. Math. 17, 1969): whenever the device
is free it takes the first in rank of what is ready. The device computes one task at a time, the
link carries one at a time, in the order of their starts.

Tasks are ranked by their depth in collectives: how many lie behind them, one after the other. So
all parts of a micro-batch (`merakc.passes.overlap.sub_batches`) reach their next collective before
any goes on behind it, and each computes while the others communicate: Merak's sub-pipelining (arXiv
2206.04959, section 5), for any graph and any number of parts. What leads to no further collective,
such as the gradients of weights, is computed where the device would idle, and no later than some
depths after its turn, since it holds memory.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Task(NamedTuple):
    """Something to be done: seconds of computing, then of the link, behind other tasks.

    One that `holds_link` communicates while it computes, and waits until the link is free.
    """

    name: str
    after: tuple[str, ...]
    compute_s: float
    link_s: float
    holds_link: bool = False


def list_schedule(tasks: Sequence[Task], lag: int) -> tuple[float, tuple[str, ...]]:
    """The end, in seconds, and the names of the tasks in the order in which they compute or start
    to communicate. Tasks stand behind those that they wait for.
    """
    scheduler = _Scheduler(tasks, lag)
    scheduler.run()
    return scheduler.end_s, tuple(scheduler.order)


@dataclass(slots=True)
class _Scheduler:
    """The state of the two resources. Ranks are (depth, whether it may wait, place)."""

    tasks: Sequence[Task]
    lag: int
    now_s: float = 0.0
    link_free_s: float = 0.0
    left: dict[str, int] = field(default_factory=dict)  # what a task still waits for
    readers: dict[str, list[Task]] = field(default_factory=dict)
    ranks: dict[str, tuple[int, bool, int]] = field(default_factory=dict)
    ready: list[tuple[tuple[int, bool, int], Task]] = field(default_factory=list)  # a heap
    flying: list[tuple[float, int, Task]] = field(default_factory=list)  # a heap by their end
    order: list[str] = field(default_factory=list)

    @property
    def end_s(self) -> float:
        """When both resources have ended."""
        return max(self.now_s, self.link_free_s)

    def run(self) -> None:
        self.readers = {t.name: [] for t in self.tasks}
        self.ranks = self._rank()
        for task in self.tasks:
            before = [name for name in task.after if name in self.readers]
            self.left[task.name] = len(before)
            for name in before:
                self.readers[name].append(task)
            if not before:
                heapq.heappush(self.ready, (self.ranks[task.name], task))
        while self.ready or self.flying:
            while self.flying and (self.flying[0][0] <= self.now_s or not self.ready):
                end_s, _, task = heapq.heappop(self.flying)
                self.now_s = max(self.now_s, end_s)
                self._finish(task)
            if self.ready:
                self._take(heapq.heappop(self.ready)[1])
        assert len(self.order) == len(self.tasks)

    def _take(self, task: Task) -> None:
        self.order.append(task.name)
        if task.holds_link:
            self.now_s = max(self.now_s, self.link_free_s)
        self.now_s += task.compute_s
        if task.link_s:
            self.link_free_s = max(self.link_free_s, self.now_s) + task.link_s
            heapq.heappush(self.flying, (self.link_free_s, len(self.order), task))
        else:
            self._finish(task)

    def _finish(self, task: Task) -> None:
        for reader in self.readers[task.name]:
            self.left[reader.name] -= 1
            if not self.left[reader.name]:
                heapq.heappush(self.ready, (self.ranks[reader.name], reader))

    def _rank(self) -> dict[str, tuple[int, bool, int]]:
        """A collective comes before everything that is ready: its start takes no time."""
        depth: dict[str, int] = {}
        for task in self.tasks:
            depth[task.name] = max((depth.get(name, 0) for name in task.after), default=0)
            depth[task.name] += task.link_s > 0
        leads: set[str] = set()  # to a collective
        for task in reversed(self.tasks):
            if task.link_s or task.name in leads:
                leads.update(task.after)
        found: dict[str, tuple[int, bool, int]] = {}
        for place, task in enumerate(self.tasks):
            late = task.name not in leads
            rank = depth[task.name] + late * self.lag, late, place
            found[task.name] = (-1, False, place) if task.link_s else rank
        return found
