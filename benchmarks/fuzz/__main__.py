"""`python -m benchmarks.fuzz`: damaged and hostile files are refused, or mean what they say.

Plans with reports and timelines, cluster files, ledgers, configurations and manifests of
checkpoints are damaged in their bytes and their values, half of them with checksums made anew.
Each is read, by merakc's readers and by the commands that take it, in a process of its own limits.
Sought are tracebacks, more than five seconds or 500 MB, texts that steer the terminal, and files
that are taken for something else than they say.
"""

from __future__ import annotations

import multiprocessing
import resource
import tempfile
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Annotated

import psutil
import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.fuzz.subjects import Subject, changed, run, subjects
from benchmarks.harness import finish
from merakc.errors import MerakError

MOST_S, MOST_BYTES = 5.0, 500 * 10**6
# What is taken may be planned then, which takes what such a model takes; and of the wall: a file
# that makes its reader wait for something takes no time of the processor.
WORKING_S, WAITING_S = 60.0, 200.0
# Commands refuse what the reader refuses; a few show that they tell of it.
TOLD_EVERY, SLOW_EVERY = 20, 16
REFUSED, TAKEN = "refused", "taken for what it says"


@dataclass
class Found:
    """What became of the files of one kind, and what is wrong."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slowest_s: float = 0.0


class Worker:
    """A process that reads files, one after the other; it is replaced where one takes too long."""

    def __init__(self, kinds: list[Subject], folder: Path) -> None:
        self.kinds, self.folder = kinds, folder
        self.process: ForkProcess | None = None
        self.pipe: Connection | None = None

    def judge(self, kind: int, number: int) -> tuple[str, str, float]:
        """What becomes of a file, what is wrong with that, and its seconds of the processor."""
        pipe, process = self._started()
        pipe.send((kind, number))
        usage = psutil.Process(process.pid)
        start_s, begin_s = time.monotonic(), _busy_s(usage)
        while not pipe.poll(0.5):
            busy_s = _busy_s(usage) - begin_s
            if busy_s > WORKING_S or time.monotonic() - start_s > WAITING_S:
                self.close()
                return "faults", f"takes more than {busy_s:.0f} s of work, or waits", busy_s
        try:
            outcome, fault, busy_s = pipe.recv()
        except EOFError:
            self.close()
            return "faults", "the process died", 0.0
        return outcome, fault, busy_s

    def close(self) -> None:
        """Ends the process."""
        if self.process is not None:
            self.process.kill()
            self.process.join()
        self.process = None

    def _started(self) -> tuple[Connection, ForkProcess]:
        if self.process is None or self.pipe is None:
            context = multiprocessing.get_context("fork")
            self.pipe, theirs = context.Pipe()
            self.process = context.Process(
                target=_serve, args=(theirs, self.kinds, self.folder), daemon=True
            )
            self.process.start()
            theirs.close()
        return self.pipe, self.process


def _busy_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _serve(pipe: Connection, kinds: list[Subject], folder: Path) -> None:
    """Reads files until there are no more."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    most = psutil.Process().memory_info().vms + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    while True:
        kind, number = pipe.recv()
        pipe.send(judge(kinds[kind], number, folder))


def judge(subject: Subject, number: int, folder: Path) -> tuple[str, str, float]:
    """What becomes of a file, what is wrong with that, and the seconds that reading it takes."""
    start_s, read_s = time.process_time(), 0.0
    path = folder / subject.name / subject.file
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(subject.mutant(number))
    try:
        try:
            fault = changed(subject, path)
            outcome = "faults" if fault else TAKEN
        except MerakError as error:
            str(error).encode("utf-8")
            fault, outcome = "", REFUSED
        taken = outcome == TAKEN
        for arguments in subject.commands(path) if taken or number % TOLD_EVERY == 0 else []:
            run(arguments)
        read_s = time.process_time() - start_s
        for arguments in subject.slow(path) if taken and number % SLOW_EVERY == 0 else []:
            run(arguments)
    except BaseException as error:  # what is looked for
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if "merakc" in f.filename and "fuzz" not in f.filename] or frames
        where = f"{Path(own[-1].filename).name}:{own[-1].lineno}"
        return "faults", f"{type(error).__name__} at {where}: {str(error)[:200]}", read_s
    return outcome, fault, read_s


def fuzz(count: int, seed: int, console: Console) -> dict[str, Found]:
    """Reads so many damaged files, of each kind its share."""
    with tempfile.TemporaryDirectory(prefix="merakc-fuzz-") as name:
        folder = Path(name)
        kinds = subjects(folder)
        found = {kind.name: Found() for kind in kinds}
        whole = sum(kind.share for kind in kinds)
        worker = Worker(kinds, folder)
        with Progress(console=console, disable=not console.is_terminal) as progress:
            bar = progress.add_task("reading", total=count)
            for k, kind in enumerate(kinds):
                own = found[kind.name]
                for number in range(count * kind.share // whole):
                    outcome, fault, busy_s = worker.judge(k, seed * count + number)
                    if busy_s > MOST_S and not fault:
                        outcome, fault = "faults", f"takes {busy_s:.1f} s"
                    own.outcomes[outcome] += 1
                    own.slowest_s = max(own.slowest_s, busy_s)
                    if fault:
                        own.faults.append(f"{kind.name} {seed * count + number}: {fault}")
                    progress.advance(bar)
                progress.print(f"{kind.name}: {own.outcomes.total():,}, {len(own.faults)} faults")
        worker.close()
    return found


def table(found: dict[str, Found]) -> Table:
    """A row for each kind."""
    made = Table("file", "read", REFUSED, TAKEN, "faults", "slowest")
    for name, own in found.items():
        numbers = [f"{own.outcomes[o]:,}" for o in (REFUSED, TAKEN, "faults")]
        made.add_row(name, f"{own.outcomes.total():,}", *numbers, f"{own.slowest_s:.1f} s")
    return made


def main(
    count: Annotated[int, typer.Option(help="Damaged files.", min=20)] = 20_000,
    seed: Annotated[int, typer.Option(help="Of the damage.")] = 0,
) -> None:
    """Reads damaged files of every kind; exits with 1 where one of them is a fault of merakc's."""
    torch.set_num_threads(1)
    console = Console()
    start_s = time.perf_counter()
    found = fuzz(count, seed, console)
    console.print(table(found))
    faults = [fault for own in found.values() for fault in own.faults]
    for text in faults[:50]:
        console.print(ascii(text), style="red", markup=False)
    total = sum(own.outcomes.total() for own in found.values())
    wall_s = time.perf_counter() - start_s
    finish(console, not faults, f"{total:,} files, {len(faults)} faults, {wall_s:.0f} s")


if __name__ == "__main__":
    typer.run(main)
