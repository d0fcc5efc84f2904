"""What `benchmarks.overhead` measures: steps in alternation, ranks' CPU time, first steps.

A step is forward and backward of a batch, from gradients of None. Before anything is timed, the
gradients of both sides are compared. Every measurement is repeated while other processes take more
than `MAX_OTHERS` of the CPU, and the quietest try counts.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

import merakc
from benchmarks.harness import in_child
from benchmarks.overlap_steps import VOCABULARY, Size, build
from benchmarks.peers.rounds import MAX_OTHERS, MAX_TRIES, cpu_busy_s
from benchmarks.ranks import run_ranks
from benchmarks.reference import split_batch

Batch = dict[str, torch.Tensor]
WARM_UP, VISIT_S = 3, 0.5
TIMEOUT_S = 1800.0


def batch_of(size: Size) -> Batch:
    """Random words, which are their own labels."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (size.samples, size.sequence), generator=generator)
    return {"input_ids": ids, "labels": ids}


@dataclass(frozen=True, slots=True)
class Duel:
    """Seconds of the same step on both sides, by round; `theirs` is the rival's.

    `error` is the largest difference of a gradient, relative to its parameter's largest; `others`
    the share of the CPU that other processes took in the worst round.
    """

    model: str
    size: Size
    micro_batches: int
    theirs_s: tuple[float, ...]
    ours_s: tuple[float, ...]
    error: float
    others: float

    @property
    def ratio(self) -> float:
        """The median over rounds of our seconds over theirs."""
        return statistics.median(self.ratios)

    @property
    def ratios(self) -> list[float]:
        """Of each round."""
        return [a / b for a, b in zip(self.ours_s, self.theirs_s, strict=True)]


class Side:
    """One side's step, and the gradients that it leaves."""

    def __init__(self, model: nn.Module, batch: Batch, micro_batches: int, call: Any) -> None:
        self.model, self.call = model, call
        self.parts = split_batch(batch, micro_batches)
        self.parameters = list(model.parameters())

    def step(self) -> None:
        """Forward and backward of all micro-batches, as behind an optimizer's `zero_grad`."""
        for parameter in self.parameters:
            parameter.grad = None
        for part in self.parts:
            (self.call(**part).loss / len(self.parts)).backward()

    def gradients(self) -> dict[str, torch.Tensor]:
        """By parameter."""
        return {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}


Rival = Literal["eager", "torch.compile", "unwatched"]


def duel(
    model: str, size: Size, *, micro_batches: int = 1, rival: Rival = "eager", rounds: int = 5
) -> Duel:
    """Our step against eager PyTorch's, `torch.compile`'s, or our own that looks for nothing that
    is not finite ("unwatched").
    """
    batch = batch_of(size)
    plain = build(model, size).train()

    def own(**options: Any) -> Side:
        made = merakc.auto_parallel(
            build(model, size).train(), batch, micro_batches=micro_batches,
            compile=rival == "torch.compile", **options,
        )  # fmt: skip
        return Side(made, batch, 1, made)  # it splits the batch itself

    if rival == "unwatched":
        theirs = own(on_nonfinite="ignore")
    else:
        call = torch.compile(plain) if rival == "torch.compile" else plain
        theirs = Side(plain, batch, micro_batches, call)
    ours = own()
    for side in (theirs, ours):
        for _ in range(WARM_UP):
            side.step()
    error = difference(ours.gradients(), theirs.gradients())
    seconds: dict[Side, list[float]] = {theirs: [], ours: []}
    worst = 0.0
    repeats = repeats_for(theirs.step)
    for k in range(rounds):
        for side in (theirs, ours) if k % 2 else (ours, theirs):
            step_s, others = quiet(side.step, repeats)
            seconds[side].append(step_s)
            worst = max(worst, others)
    return Duel(
        model,
        size,
        micro_batches,
        theirs_s=tuple(seconds[theirs]),
        ours_s=tuple(seconds[ours]),
        error=error,
        others=worst,
    )


def difference(own: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The largest difference of a gradient, relative to the largest of all."""
    assert own.keys() == wanted.keys(), own.keys() ^ wanted.keys()
    largest = max(g.abs().max().item() for g in wanted.values())
    return max((own[n] - g).abs().max().item() for n, g in wanted.items()) / largest


def repeats_for(step: Callable[[], None]) -> int:
    """How many steps take about `VISIT_S`: of shorter ones the system's clocks tell too little."""
    start_s = time.perf_counter()
    step()
    return max(1, round(VISIT_S / (time.perf_counter() - start_s)))


def quiet(step: Callable[[], None], repeats: int) -> tuple[float, float]:
    """Seconds of a step, and the share of the CPU of others; the quietest of some tries."""
    tries = []
    for _ in range(MAX_TRIES):
        busy_s, own_s, start_s = cpu_busy_s(), time.process_time(), time.perf_counter()
        for _ in range(repeats):
            step()
        wall_s, own_s = time.perf_counter() - start_s, time.process_time() - own_s
        others = max(0.0, cpu_busy_s() - busy_s - own_s) / (wall_s * (os.cpu_count() or 1))
        tries.append((others, wall_s / repeats))
        if others <= MAX_OTHERS:
            break
    others, step_s = min(tries)
    return step_s, others


@dataclass(frozen=True, slots=True)
class Crowd:
    """The CPU seconds of a step, added up over the ranks of a pipeline, and their actions."""

    ranks: int
    cpu_s: float
    actions: int


def crowd(size: Size, ranks: int, micro_batches: int, steps: int) -> Crowd:
    """A pipeline of GPT-2: of CPU time it does not matter how few cores its ranks share."""

    def run() -> tuple[float, int]:
        batch = batch_of(size)
        parallel = merakc.auto_parallel(
            build("gpt2", size).train(), batch, dp=1, tp=1, pp=dist.get_world_size(),
            micro_batches=micro_batches, schedule="1f1b", recompute="none",
        )  # fmt: skip
        side = Side(parallel, batch, 1, parallel)
        for _ in range(WARM_UP):
            side.step()
        dist.barrier()
        start_s = time.process_time()
        for _ in range(steps):
            side.step()
        return (time.process_time() - start_s) / steps, len(parallel.last_events)

    found = run_ranks(ranks, run, timeout_s=TIMEOUT_S)
    return Crowd(ranks, sum(cpu_s for cpu_s, _ in found), sum(n for _, n in found))


@dataclass(frozen=True, slots=True)
class First:
    """Seconds of a fresh process: imports, building the model, `auto_parallel`, the first step with
    its optimizer. What is asked for is the last two.
    """

    cached: bool
    import_s: float
    build_s: float
    plan_s: float
    step_s: float

    @property
    def latency_s(self) -> float:
        """From the model to the end of the first optimizer step."""
        return self.plan_s + self.step_s


def first(model: str, size: Size, plan: Path | None) -> First:
    """The first step of a fresh process, with a plan of another run where one is given."""
    given = {"model": model, "size": [size.layers, size.hidden, size.sequence, size.samples],
             "plan": str(plan) if plan else None}  # fmt: skip
    seconds = in_child("benchmarks.overhead.first", json.dumps(given), timeout_s=TIMEOUT_S)
    return First(cached=plan is not None, **seconds)


def median_first(found: Sequence[First]) -> First:
    """Of some repeats the one of median latency."""
    return sorted(found, key=lambda f: f.latency_s)[len(found) // 2]
