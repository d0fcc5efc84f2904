"""`python -m benchmarks.peers.worker '{...}'`: one rank of a contestant, which does as it is told.

Reads a command a line from standard input, answers each with a line on standard output, as JSON.
What the contestants print goes to standard error.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from benchmarks.peers.probe import NAME, Tape, install
from benchmarks.peers.training import (
    Contestant,
    Training,
    first_gradients,
    largest_error,
    train_alone,
)

BATCHES = 4  # that steps go round
# Some adapters import it, others leave it to the model: it is nobody's memory.
MODEL_CODE = "transformers.models.llama.modeling_llama"
TIMEOUT_S = 300.0
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # proc(5): the peak of resident memory starts anew

Answer = dict[str, Any]


@dataclass(slots=True)
class Rank:
    """A rank with its contestant. Its methods are the commands; all ranks get the same ones."""

    training: Training
    rank: int
    contestant: Contestant
    tape: Tape
    own: dist.ProcessGroupGloo  # for the start and the end of what is timed; never muted
    base_bytes: int = 0  # resident before the model was built
    taken: int = 0

    def train(self, steps: int, muted: bool = False) -> Answer:
        """Seconds of a step, the mean of `steps`; the CPU's for all of them; and their peak of
        resident memory, less what the process had with no model.
        """
        given = self.contestant.dp_rank
        dp_rank = self.training.dp_rank(self.rank) if given is None else given
        batches = [self.training.batch((self.taken + k) % BATCHES, dp_rank) for k in range(steps)]
        self.taken += steps
        self.tape.muted = muted
        if RESET.exists():
            RESET.write_text(RESET_PEAK)
        wall_s, cpu_s = self._timed(lambda: [self.contestant.step(batch) for batch in batches])
        self.tape.muted = False
        peak_bytes = resident_bytes("VmHWM") - self.base_bytes
        return {"step_s": wall_s / steps, "cpu_s": cpu_s, "peak_bytes": peak_bytes}

    def compare(self) -> Answer:
        """How far the weights are from those of one process; after a step, the gradients, too."""
        found = self.contestant.weights()
        if self.rank:
            return {"error": 0.0}
        before, after = train_alone(self.training, self.taken)
        own = {name: found[name] for name in after}
        answer = {"error": largest_error(own, before, after)}
        if self.taken == 1:
            got, wanted = first_gradients(before, own), first_gradients(before, after)
            zeros = {name: torch.zeros_like(value) for name, value in wanted.items()}
            answer["gradient_error"] = largest_error(got, zeros, wanted)
        del found, own, before, after
        release_memory()  # of what only comparing took
        return answer

    def record(self) -> Answer:
        """Remembers the collectives of a step: their number, and the bytes that they were given."""
        self.tape.recording = True
        self.train(1)
        self.tape.recording = False
        return {"collectives": len(self.tape.calls), "bytes": self.tape.handed_bytes}

    def replay(self) -> Answer:
        """Seconds of a step's collectives alone."""
        wall_s, _ = self._timed(self.tape.replay)
        return {"alone_s": wall_s}

    def _timed(self, work: Callable[[], object]) -> tuple[float, float]:
        self.own.barrier().wait()  # type: ignore[attr-defined]
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        work()
        self.own.barrier().wait()  # type: ignore[attr-defined]
        return time.perf_counter() - start_s, time.process_time() - start_cpu_s


def release_memory() -> None:
    """Gives the system back what is not used, so that nothing is counted that was only built."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def resident_bytes(field: str) -> int:
    """Of this process, "VmRSS" now or "VmHWM" at its peak; 0 where the system does not tell."""
    lines = STATUS.read_text().splitlines() if STATUS.exists() else []
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(field)), 0)


def start(peer: str, form: str, sizes: dict[str, int], rank: int, store: str, probe: bool) -> Rank:
    """Joins the other ranks and builds the contestant."""
    torch.set_num_threads(1)
    training, tape = Training(**sizes), Tape()
    own = FileStore(f"{store}-own", training.ranks)
    if probe:
        install(tape)
    dist.init_process_group(
        NAME if probe else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=training.ranks,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    group = dist.ProcessGroupGloo(own, rank, training.ranks, timedelta(seconds=TIMEOUT_S))
    module = importlib.import_module(f"benchmarks.peers.{peer}")
    importlib.import_module(MODEL_CODE)
    release_memory()
    base_bytes = resident_bytes("VmRSS")
    contestant = module.build(training, form, rank)
    return Rank(training, rank, contestant, tape, group, base_bytes)


def serve(rank: Rank, commands: TextIO, answers: TextIO) -> None:
    """Does what is asked until nothing more comes."""
    for line in commands:
        name, arguments = json.loads(line)
        answers.write(json.dumps(getattr(rank, name)(**arguments)) + "\n")
        answers.flush()


def main() -> None:
    """Runs a rank; ends without tidying up, which may wait for ranks that are gone."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    rank = start(**json.loads(sys.argv[1]))
    answers.write("{}\n")
    answers.flush()
    serve(rank, sys.stdin, answers)
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
