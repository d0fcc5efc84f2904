"""Measures contestants in turns, so that what the machine does besides meets all alike."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.peers.crew import Crew, CrewError
from benchmarks.peers.environments import Environment
from benchmarks.peers.networks import Network
from benchmarks.peers.training import Training

CHECKED_STEPS = 3  # before the weights are compared; they warm up, too
MAX_OTHERS = 0.05  # share of the machine's CPU that others may take, or the visit is repeated
MAX_TRIES = 4
STAT = Path("/proc/stat")

Advance = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Entry:
    """A contestant: the module of `benchmarks.peers`, in which form (its sharding, its schedule),
    and what tables call it. `alone` is one process that does the work of all ranks.
    """

    peer: str
    form: str
    label: str
    alone: bool = False


class Visit(NamedTuple):
    """Some steps of a contestant: others' share of the CPU, of the slowest rank seconds of a step,
    of the rank with the most the peak of its resident memory.
    """

    others: float
    step_s: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured of an entry; `steps_s` by round, the slowest rank's mean of some steps.

    `hidden` is 1 − (step with communication − step without any) / communication alone: 1 where
    communication costs no time, 0 where it costs what it takes by itself, less where it is in the
    way of computing besides. `others` is the largest share of the CPU that other processes took.
    `gradient_error` is of the first step, `error` of the weights after `CHECKED_STEPS`,
    `peaks_bytes` by round that of the rank with the most.
    """

    network: str
    entry: Entry
    failure: str = ""
    steps_s: tuple[float, ...] = ()
    error: float = float("nan")
    gradient_error: float = float("nan")
    peaks_bytes: tuple[int, ...] = ()
    others: float = 0.0
    with_s: float = float("nan")
    without_s: float = float("nan")
    alone_s: float = float("nan")
    collectives: int = 0
    handed_bytes: int = 0

    @property
    def step_s(self) -> float:
        """The median."""
        return statistics.median(self.steps_s) if self.steps_s else float("nan")

    @property
    def peak_bytes(self) -> int:
        """The median."""
        return round(statistics.median(self.peaks_bytes)) if self.peaks_bytes else 0

    @property
    def hidden(self) -> float:
        """The share of communication that is hidden."""
        return 1 - (self.with_s - self.without_s) / self.alone_s


def ratios(row: Row, base: Row) -> tuple[float, float, float]:
    """The median, least and largest of the row's step over the base's, each of the same round."""
    each = [a / b for a, b in zip(row.steps_s, base.steps_s, strict=True)]
    return statistics.median(each), min(each), max(each)


def turn(entries: list[Entry], k: int) -> list[Entry]:
    """The order of a round: each round another one begins."""
    first = k % len(entries) if entries else 0
    return entries[first:] + entries[:first]


class Course:
    """The training that entries are measured at; `advance` hears of every part that begins."""

    def __init__(
        self, training: Training, environments: Mapping[str, Environment], advance: Advance
    ) -> None:
        self.training, self.environments, self.advance = training, environments, advance

    def crew(self, entry: Entry, network: Network, *, probe: bool) -> Crew:
        """The entry's ranks; they still start."""
        found = self.environments.get(entry.peer)
        training = self.training.alone() if entry.alone else self.training
        return Crew(
            entry.peer, entry.form, training, network, probe=probe,
            python=found.python if found else None,
            environment=found.variables if found else None,
        )  # fmt: skip

    def measure(
        self,
        network: Network,
        entries: list[Entry],
        rounds: int,
        steps: int,
        *,
        shares: bool = True,
    ) -> list[Row]:
        """All entries: their weights against one process, steps in turns, then what is hidden.

        The last, on ranks of their own, where `shares` asks for it. An entry that fails leaves.
        """
        rows = {entry: Row(network.name, entry) for entry in entries}
        with ExitStack() as stack:
            crews = {}
            for entry in entries:
                self.advance(f"{network.name}: {entry.label} starts")
                try:
                    crews[entry], rows[entry] = self._started(rows[entry], network, stack)
                except CrewError as failure:
                    rows[entry] = replace(rows[entry], failure=str(failure))
            for k in range(rounds):
                for entry in turn(list(crews), k):
                    self.advance(f"{network.name}: {entry.label}, round {k + 1} of {rounds}")
                    row = rows[entry]
                    try:
                        visit = self._visit(crews[entry], steps)
                    except CrewError as failure:
                        rows[entry] = replace(row, failure=str(failure), steps_s=(), peaks_bytes=())
                        crews.pop(entry).close()
                        continue
                    rows[entry] = replace(
                        row,
                        steps_s=(*row.steps_s, visit.step_s),
                        peaks_bytes=(*row.peaks_bytes, visit.peak_bytes),
                        others=max(row.others, visit.others),
                    )
        for entry in crews if shares else ():
            self.advance(f"{network.name}: {entry.label}, what is hidden")
            try:
                rows[entry] = self._share(rows[entry], network, rounds, steps)
            except CrewError as failure:
                rows[entry] = replace(rows[entry], failure=str(failure))
        return list(rows.values())

    def _started(self, row: Row, network: Network, stack: ExitStack) -> tuple[Crew, Row]:
        """The entry's ranks, compared with one process; those that fail are ended."""
        with ExitStack() as failing:
            crew = failing.enter_context(self.crew(row.entry, network, probe=False))
            crew.answers()
            crew.ask("train", steps=1)
            gradient_error = crew.ask("compare")[0]["gradient_error"]
            crew.ask("train", steps=CHECKED_STEPS - 1)
            error = crew.ask("compare")[0]["error"]
            crew.ask("train", steps=1)  # takes memory anew that comparing has given back
            stack.enter_context(failing.pop_all())
        return crew, replace(row, gradient_error=gradient_error, error=error)

    def _visit(self, crew: Crew, steps: int, *, muted: bool = False) -> Visit:
        """Some steps; the quietest of some tries."""
        tries = []
        for _ in range(MAX_TRIES):
            start_s, busy_s = time.perf_counter(), cpu_busy_s()
            answers = crew.ask("train", steps=steps, muted=muted)
            wall_s, busy_s = time.perf_counter() - start_s, cpu_busy_s() - busy_s
            own_s = sum(answer["cpu_s"] for answer in answers)
            others = max(0.0, busy_s - own_s) / (wall_s * (os.cpu_count() or 1))
            step_s, peak_bytes = (max(a[key] for a in answers) for key in ("step_s", "peak_bytes"))
            tries.append(Visit(others, step_s, peak_bytes))
            if others <= MAX_OTHERS:
                break
        return min(tries)

    def _share(self, row: Row, network: Network, rounds: int, steps: int) -> Row:
        """With the communication, without any, and that alone, in turns."""
        found: dict[str, list[float]] = {"with": [], "without": [], "alone": []}
        with self.crew(row.entry, network, probe=True) as crew:
            crew.answers()
            crew.ask("train", steps=CHECKED_STEPS)  # DeepSpeed sees the order of layers, too
            crew.ask("train", steps=1, muted=True)
            recorded = crew.ask("record")[0]
            for _ in range(rounds):
                found["with"].append(self._visit(crew, steps).step_s)
                found["without"].append(self._visit(crew, steps, muted=True).step_s)
                found["alone"].append(max(a["alone_s"] for a in crew.ask("replay")))
        return replace(
            row,
            with_s=statistics.median(found["with"]),
            without_s=statistics.median(found["without"]),
            alone_s=statistics.median(found["alone"]),
            collectives=recorded["collectives"],
            handed_bytes=recorded["bytes"],
        )


def cpu_busy_s() -> float:
    """Seconds of CPU that all processes have taken so far; 0 where the system does not tell."""
    if not STAT.exists():
        return 0.0
    user, nice, system, _, _, irq, soft_irq, *_ = map(int, STAT.read_text().split()[1:9])
    return (user + nice + system + irq + soft_irq) / os.sysconf("SC_CLK_TCK")
