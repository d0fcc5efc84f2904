"""`python -m benchmarks.memory`: predicted peak memory against the bytes that are really alive.

Every rank of each cell counts all storages that its step makes and frees, and compares their
highest point, the median of five steps, with the prediction from live ranges. Where gradients are
scattered, the last bucket of a micro-batch and other ranks' parts of it may still be on their way
in the next: when they are free depends on the network, so that much is allowed for.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

import merakc
from benchmarks.harness import JsonPath, finish, rich_table
from benchmarks.models import MODELS
from benchmarks.ranks import run_ranks
from benchmarks.reference import step_batch
from merakc.equality.compare import optimizer_for
from merakc.runtime.live_bytes import LiveBytes
from merakc.train.model import ParallelModel

# Large enough that kernels, and not Python between them, say when a message leaves.
RANKS, MICRO_BATCHES, BATCH_SIZE = 2, 4, 512
SHARDED_BATCH_SIZE = 16  # small enough that state counts, where it is sharded
BOUND = 0.03
SWITCH_INTERVAL_S = 1e-5
REPEATS = 5  # when a message leaves varies from step to step
MODELS_OF_CELLS = ("gpt2", "llama", "t5", "bert", "resnet")
CELLS: tuple[tuple[str, dict[str, Any]], ...] = (
    *(
        (model, {"pp": RANKS, "schedule": schedule, "recompute": recompute})
        for model in MODELS_OF_CELLS
        for schedule, recompute in (
            ("1f1b", "none"), ("gpipe", "stage"), ("zb-h1", "none"), ("zb-v", "selective"),
        )
    ),
    *(
        (model, {"dp": RANKS, "state_shards": shards, "precision": precision})
        for model in ("gpt2", "resnet")
        for shards in ("zero-0", "zero-1", "zero-2", "zero-3")
        for precision in (None, "bf16-mixed")
    ),
)  # fmt: skip


def peak_live_bytes(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: Callable[[], object],
    others: Iterable[torch.Tensor] = (),
) -> int:
    """Runs one more step and gives the most bytes that were alive in it.

    Parameters, gradients, optimizer state, activations and temporaries all count; memory inside
    kernels and of the allocator does not. `others` are alive beside the model and its optimizer.
    """
    tracker = LiveBytes(
        chain(alive(model, optimizer), others)
    )  # no list: it would keep the gradients alive
    with tracker:
        step()
    return tracker.peak_bytes


def resident_bytes() -> tuple[int, int]:
    """What this process holds now, and the most since that was last forgotten."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Vm")}
    return int(found["VmRSS"]) << 10, int(found["VmHWM"]) << 10


def alive(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The tensors of a model and its optimizer, with their gradients."""
    yield from model.buffers()
    for parameter in model.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    for values in optimizer.state.values():
        yield from (t for t in values.values() if isinstance(t, torch.Tensor))


@dataclass(frozen=True, slots=True)
class Cell:
    """One model under some options of `auto_parallel`: the peak bytes of each rank."""

    model: str
    options: str
    predicted_bytes: tuple[int, ...]
    measured_bytes: tuple[int, ...]
    on_the_way_bytes: tuple[int, ...]

    @property
    def error(self) -> float:
        """The largest relative difference of a rank, less what may be on the way."""
        return peak_error(self.predicted_bytes, self.measured_bytes, self.on_the_way_bytes)


def peak_error(
    predicted_bytes: Sequence[int], measured_bytes: Sequence[int], on_the_way_bytes: Sequence[int]
) -> float:
    """The largest relative difference of a rank's peak, less what may be on the way."""
    ranks = zip(predicted_bytes, measured_bytes, on_the_way_bytes, strict=True)
    return max(max(0, abs(p - m) - way) / m for p, m, way in ranks)


def measure_step(model: str, options: dict[str, Any]) -> tuple[int, int, int]:
    """One rank's predicted and measured peak bytes of a step, and those that may be on the way;
    collective.
    """
    case = MODELS[model]
    size = SHARDED_BATCH_SIZE if "state_shards" in options else BATCH_SIZE
    batch = step_batch(case, size, torch.float32, 0)
    parallel = merakc.auto_parallel(case.model(), batch, micro_batches=MICRO_BATCHES, **options)
    optimizer = optimizer_for(parallel)
    for _ in range(2):  # afterwards the optimizer has its state
        optimizer.zero_grad()
        parallel(**batch)["loss"].backward()
        optimizer.step()
    prediction = parallel.plan_file.prediction
    assert prediction is not None
    _, rank, _ = parallel.plan.mesh.coordinates(dist.get_rank())
    predicted_bytes = prediction.peak_bytes[rank]
    return predicted_bytes, step_peak(parallel, optimizer, batch), on_the_way(parallel)


def step_peak(
    parallel: ParallelModel, optimizer: torch.optim.Optimizer, batch: dict[str, Any]
) -> int:
    """The most bytes that are alive on this rank in a step, the median of several; collective.

    The optimizer must have its state already.
    """
    # Python lets another thread run every 5 ms, which is as long as many actions here: what lets go
    # of sent values would come too late.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    peaks = []
    for _ in range(REPEATS):
        optimizer.zero_grad()
        others = [*_constants(parallel), *_buckets(parallel)]
        peaks.append(peak_live_bytes(parallel, optimizer, lambda: parallel(**batch), others))
    return statistics.median_low(peaks)


def _constants(parallel: ParallelModel) -> list[torch.Tensor]:
    """The tensors that compiled steps hold beside the state."""
    steps = parallel._own("_steps").compiled.values()
    stages = [stage for step in steps for stage in step.executor.stages.values()]
    return [value for stage in stages for value in stage.constants.values()]


def _buckets(parallel: ParallelModel) -> list[torch.Tensor]:
    """What a rank holds of sharded parameters beside its own part."""
    sharded = parallel._own("_steps").sharded
    return [b.kept for b in sharded.buckets] if sharded else []


def on_the_way(parallel: ParallelModel) -> int:
    """The bytes of the largest bucket of gradients that is scattered, and of its parts."""
    sharded = parallel._own("_steps").sharded
    scattered = [b for b in sharded.buckets if b.groups.shards.gradients > 1] if sharded else []
    return max((2 * b.numel * b.gradient_dtype.itemsize for b in scattered), default=0)


def cells_table(cells: list[Cell]) -> Table:
    """A row a cell."""
    rows = [["model", "options", "predicted / measured", "on the way", "largest error"]]
    for cell in cells:
        pairs = zip(cell.predicted_bytes, cell.measured_bytes, strict=True)
        colour = "green" if cell.error <= BOUND else "red"
        rows.append([
            cell.model, cell.options, ", ".join(f"{p} / {m}" for p, m in pairs),
            str(max(cell.on_the_way_bytes)),
            f"[{colour}]{cell.error:.2%}[/]",
        ])  # fmt: skip
    return rich_table(rows, left=2, title="Peak bytes of a step on each rank: predicted / measured")


def main(
    models: Annotated[str, typer.Option(help="Comma-separated; all if empty.")] = "",
    json_path: JsonPath = None,
) -> None:
    """Compares predicted with measured peaks; exits with 1 where one is more than 3 % off."""
    torch.set_num_threads(1)
    cells = []
    for model, options in CELLS:
        if not models or model in models.split(","):
            found = run_ranks(RANKS, measure_step, model, options, timeout_s=120.0)
            predicted, measured, on_the_way = zip(*found, strict=True)
            text = " ".join(str(value) for value in options.values() if isinstance(value, str))
            cells.append(Cell(model, text, predicted, measured, on_the_way))
    console = Console(width=120)
    console.print(cells_table(cells))
    within = sum(cell.error <= BOUND for cell in cells)
    good = within == len(cells)
    body = [{**dataclasses.asdict(c), "error": c.error} for c in cells]
    finish(
        console, good, f"{within} of {len(cells)} cells within {BOUND:.0%}",
        json_path=json_path, figures={"passed": good, "cells": body},
    )  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
