"""`python -m benchmarks.soak`: a long run with shapes that change, evaluations, saves and kills.

Two ranks train a small Llama with dropout. Every step has a batch of another length, every 25th is
followed by an evaluation, every 50th by a checkpoint that is written while training goes on. Every
300 steps or so all ranks are killed, at any moment, and the run goes on from the newest checkpoint.
Its losses must be those, bit for bit, of a run that nobody disturbs, and its memory must be flat.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import psutil
import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

import merakc
from benchmarks.harness import finish
from benchmarks.models import MODELS
from merakc.equality.ranks import RankError, run_ranks
from merakc.machines.cluster import NOMINAL_CPU

RANKS, SAMPLES, VOCABULARY = 2, 4, 31
EVALUATES, SAVES = 25, 50
# Of steps between two kills, the share that warms up: all shapes are compiled, states are there.
WARM_UP = 0.5
MOST_GROWTH = 0.02
LAYOUTS: Mapping[str, dict[str, Any]] = {
    "dp2 zero-1": {"dp": 2, "state_shards": "zero-1", "micro_batches": 2},
    "tp2": {"tp": 2, "micro_batches": 2},
    "pp2": {"pp": 2, "micro_batches": 2},
}


@dataclass
class Life:
    """What a life of the run has left: losses by step, those of evaluations, and bytes."""

    losses: dict[int, float] = field(default_factory=dict)
    evaluated: dict[int, float] = field(default_factory=dict)
    rss_bytes: dict[int, int] = field(default_factory=dict)

    @property
    def steady(self) -> tuple[float, float] | None:
        """Median bytes of the two halves of what comes behind the first steps; None of too few."""
        steps = sorted(self.rss_bytes)
        kept = [self.rss_bytes[s] for s in steps[int(WARM_UP * len(steps)) :]]
        if len(kept) < 20:
            return None
        half = len(kept) // 2
        return median(kept[:half]), median(kept[half:])


@dataclass(frozen=True)
class Course:
    """How long a run is, over how many lengths of text, and when it is killed."""

    steps: int = 2000
    shapes: int = 24
    kill_every: int = 300
    layout: str = "dp2 zero-1"

    def batch(self, step: int, dp_rank: int) -> dict[str, torch.Tensor]:
        """A dp rank's part of the batch of a step, of one of the lengths."""
        pick = torch.Generator().manual_seed(step)
        length = 8 + int(torch.randint(self.shapes, (), generator=pick))
        ids = torch.randint(VOCABULARY, (2, SAMPLES, length), generator=pick)[dp_rank]
        return {"input_ids": ids, "labels": ids}


def train(course: Course, folder: Path, log: Path, kill_at: int | None) -> None:
    """The life of a rank: from the newest checkpoint to the end, or to where it is killed."""
    model = merakc.auto_parallel(
        MODELS["llama"].build(0.1), course.batch(0, 0), cluster=NOMINAL_CPU, seed=1,
        **LAYOUTS[course.layout],
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = 0
    if merakc.latest(folder) is not None:
        first = merakc.load(folder, model, optimizer).extra["next"]
    own, dp_rank = psutil.Process(), model.data_parallel_rank
    pids: list[int] = [0] * RANKS
    dist.all_gather_object(pids, os.getpid())
    saving: Any = None
    for step in range(first, course.steps):
        if step == kill_at and model.rank == 0:
            for pid in reversed(pids):
                os.kill(pid, signal.SIGKILL)
        loss = model(**course.batch(step, dp_rank)).loss
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        told: dict[str, Any] = {"step": step, "loss": loss.item(), "rss": own.memory_info().rss}
        if step % EVALUATES == EVALUATES - 1:
            model.eval()
            with torch.no_grad():
                told["evaluated"] = model(**course.batch(-1 - step % 3, dp_rank)).loss.item()
            model.train()
        if step % SAVES == SAVES - 1:
            saving = merakc.save(
                folder / f"step-{step + 1}", model, optimizer, extra={"next": step + 1},
                keep_last=2, wait=False,
            )  # fmt: skip
        if model.rank == 0:
            with log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(told) + "\n")
    if saving is not None:
        saving.wait()


def lives(course: Course, *, disturbed: bool, seed: int = 0) -> Iterator[Life]:
    """The lives of a run, one after the other; one, where nobody disturbs it."""
    pick, folder = random.Random(seed), Path(tempfile.mkdtemp(prefix="merakc-soak-"))
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir()
    try:
        for number in range(1, course.steps):
            log, at = folder / f"life-{number}", number * course.kill_every
            kill_at = at + pick.randrange(SAVES) if disturbed else None
            # Only a life that is to be killed may end with an error.
            with suppress(*([] if kill_at is None else [RankError])):
                run_ranks(RANKS, partial(train, course, checkpoints, log, kill_at), timeout_s=7200)
            life = _read(log)
            yield life
            if course.steps - 1 in life.losses:
                return
            assert max(life.losses) + 1 == kill_at, "it ended otherwise"
    finally:
        shutil.rmtree(folder)


def _read(log: Path) -> Life:
    life = Life()
    for line in log.read_text(encoding="utf-8").splitlines():
        told = json.loads(line)
        life.losses[told["step"]] = told["loss"]
        life.rss_bytes[told["step"]] = told["rss"]
        if "evaluated" in told:
            life.evaluated[told["step"]] = told["evaluated"]
    return life


def faults(whole: Life, found: Sequence[Life]) -> list[str]:
    """What is wrong with a disturbed run."""
    wrong = []
    for k, life in enumerate(found):
        for name in ("losses", "evaluated"):
            wanted, own = getattr(whole, name), getattr(life, name)
            unlike = [step for step, value in own.items() if wanted[step] != value]
            if unlike:
                step = unlike[0]
                wrong.append(f"life {k}, {name} of step {step}: {own[step]} for {wanted[step]}")
    seen = set().union(*(life.losses for life in found))
    if len(seen) < len(whole.losses):
        wrong.append(f"{len(whole.losses) - len(seen)} steps were never taken")
    wrong += [f"a life grows by {g:.1%}" for g in growths([whole, *found]) if g > MOST_GROWTH]
    ends = [life.steady[1] for life in found if life.steady is not None]
    if ends and whole.steady is not None and max(ends) > (1 + MOST_GROWTH) * whole.steady[1]:
        more = max(ends) / whole.steady[1] - 1
        wrong.append(f"a life ends with {more:.1%} more memory than the undisturbed run")
    return wrong


def growths(found: Sequence[Life]) -> list[float]:
    """By how much of its memory each life grows once it is warm."""
    steady = [life.steady for life in found]
    return [pair[1] / pair[0] - 1 for pair in steady if pair is not None]


def table(whole: Life, found: Sequence[Life]) -> Table:
    """A row for each life."""
    made = Table("life", "steps", "memory", "growth once warm")
    for name, life in (("undisturbed", whole), *((str(k), life) for k, life in enumerate(found))):
        steady = life.steady
        size = f"{median(life.rss_bytes.values()) / 1e6:.1f} MB"
        growth = f"{steady[1] / steady[0] - 1:+.2%}" if steady else "-"
        made.add_row(name, f"{min(life.losses)} to {max(life.losses)}", size, growth)
    return made


def main(
    steps: Annotated[int, typer.Option(help="Of each run.", min=10)] = 2000,
    shapes: Annotated[int, typer.Option(help="Lengths of texts.", min=1)] = 24,
    kill_every: Annotated[int, typer.Option(help="Steps.", min=SAVES)] = 300,
    layout: Annotated[str, typer.Option(help=", ".join(LAYOUTS))] = "dp2 zero-1",
    seed: Annotated[int, typer.Option(help="Of the kills.")] = 0,
) -> None:
    """Runs undisturbed and disturbed; exits with 1 where losses differ or memory grows."""
    torch.set_num_threads(1)
    console, start_s = Console(), time.perf_counter()
    course = Course(steps, shapes, kill_every, layout)
    (whole,) = lives(course, disturbed=False)
    found = list(lives(course, disturbed=True, seed=seed))
    console.print(table(whole, found))
    wrong = faults(whole, found)
    for text in wrong:
        console.print(text, style="red", markup=False)
    told = f"{layout}, {steps} steps, {len(found) - 1} kills, {len(whole.evaluated)} evaluations"
    finish(console, not wrong, f"{told}, {time.perf_counter() - start_s:.0f} s")


if __name__ == "__main__":
    typer.run(main)
