"""`python -m benchmarks.emulated`: simulated makespans against real processes with real messages.

Each rank runs its Program of every schedule with sleeps in place of kernels: the receives that are
posted ahead, the sends and the waits are those of the executor, over gloo. As in training, the
simulator is given measured figures: how long a sleep really takes, and the latency of a message.
Then a small GPT-2 is trained with real kernels on two ranks, and its step held against the
prediction that `auto_parallel` makes from the kernels that it measures.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
import torch.distributed as dist
import transformers
import typer
from rich.console import Console
from rich.progress import track

import merakc
from benchmarks.harness import JsonPath, finish, rich_table
from benchmarks.ranks import run_ranks
from merakc.analysis.calls import ways
from merakc.ir.costs import CostTable, StageCost
from merakc.ir.graph import TensorSpec
from merakc.ir.program import ActionKind, Mesh, Program, Transfer
from merakc.ir.schedule import Schedule
from merakc.passes.programs.schedule import build_programs
from merakc.runtime.groups import Groups
from merakc.runtime.messages import Messages
from merakc.schedules.registry import NAMES, make_schedule
from merakc.simulation.simulate import simulate

BOUND, REAL_BOUND = 0.03, 0.10
CALIBRATIONS = 10
WORDS = 1024  # of a message, float32
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Cell:
    """One schedule on `ranks` processes; measured is the median of the runs."""

    schedule: str
    ranks: int
    micro_batches: int
    simulated_s: float
    runs_s: tuple[float, ...]
    bound: float = BOUND

    @property
    def passed(self) -> bool:
        """Whether the simulated makespan is within its bound of the measured one."""
        return self.error <= self.bound

    @property
    def measured_s(self) -> float:
        """The median."""
        return statistics.median(self.runs_s)

    @property
    def error(self) -> float:
        """Relative to the simulated makespan."""
        return abs(self.measured_s - self.simulated_s) / self.simulated_s


def stage_cost(unit_s: float, chunks: int) -> StageCost:
    """Forward, input gradient, weight gradient and recomputation of a unit a rank each."""
    part_s = unit_s / chunks
    return StageCost(
        forward_s=part_s, backward_s=2 * part_s, input_grad_s=part_s, weight_grad_s=part_s,
        recompute_s=part_s,
    )  # fmt: skip


def pipeline(schedule: Schedule) -> list[Transfer]:
    """One value from each stage to the next."""
    return [Transfer(f"h{s}", s, s + 1, 4 * WORDS, True) for s in range(schedule.stages - 1)]


def calibrate(part_s: float) -> tuple[float, float]:
    """What a sleep of `part_s` takes with all ranks at it, and a message's latency; collective."""
    dist.barrier()
    slept_s = []
    for _ in range(CALIBRATIONS):
        start_s = time.monotonic()
        time.sleep(part_s)
        slept_s.append(time.monotonic() - start_s)
    return statistics.mean(slept_s), _latency_s()


def _latency_s() -> float:
    """Half the time of a message to a neighbour and back; collective, in pairs of ranks."""
    rank, value = dist.get_rank(), torch.zeros(WORDS)
    times_s = []
    for _ in range(CALIBRATIONS):
        start_s = time.monotonic()
        for turn in (0, 1):
            if rank % 2 == turn:
                dist.send(value, rank ^ 1)
            else:
                dist.recv(value, rank ^ 1)
        times_s.append((time.monotonic() - start_s) / 2)
    return statistics.median(times_s)


def run_emulated(
    schedule: Schedule, unit_s: float, runs: int
) -> tuple[tuple[float, float], list[tuple[float, float]]]:
    """What `calibrate` finds, and the start and end of each run on this rank, in seconds of the
    machine's clock; collective.
    """
    found_s = calibrate(unit_s * schedule.ranks / schedule.stages)
    mesh = Mesh(pp=schedule.ranks)
    rank = dist.get_rank()
    program = build_programs(mesh, schedule, pipeline(schedule))[rank]
    cost = stage_cost(unit_s, schedule.stages // schedule.ranks)
    channels = Groups(mesh, rank).channels(ways(schedule.rank_of, pipeline(schedule)))
    found = []
    for _ in range(runs + 1):
        dist.barrier()
        messages = Messages(program, _specs(schedule), CPU, channels, 60.0)
        start_s = time.monotonic()
        _run(program, messages, cost)
        found.append((start_s, time.monotonic()))
        messages.finish()
    return found_s, found[1:]  # the first opens connections


def _specs(schedule: Schedule) -> dict[tuple[int, str], TensorSpec]:
    spec = TensorSpec((WORDS,), torch.float32)
    names = [f"h{s}" for s in range(schedule.stages)]
    return {(stage, name): spec for stage in range(schedule.stages) for name in names}


def _run(program: Program, messages: Messages, cost: StageCost) -> None:
    seconds = {
        ActionKind.FORWARD: cost.forward_s,
        ActionKind.BACKWARD: cost.backward_s,
        ActionKind.INPUT_GRAD: cost.input_grad_s,
        ActionKind.WEIGHT_GRAD: cost.weight_grad_s,
        ActionKind.RECOMPUTE: cost.recompute_s,
    }
    value = torch.zeros(WORDS)
    for k, action in enumerate(program.actions):
        messages.post_receives(k)
        if action.kind in seconds:
            time.sleep(seconds[action.kind])
        elif action.peer not in (-1, program.rank):
            if action.kind is ActionKind.SEND:
                messages.send(k, action, value)
            else:
                messages.receive(k, action)


def measure(name: str, ranks: int, micro_batches: int, unit_s: float, runs: int) -> Cell:
    """Simulates a schedule and runs it."""
    schedule = make_schedule(name, ranks, micro_batches)
    found = run_ranks(ranks, run_emulated, schedule, unit_s, runs, timeout_s=300.0)
    part_s = statistics.mean(part_s for (part_s, _), _ in found)
    latency_s = statistics.mean(latency_s for (_, latency_s), _ in found)
    late_s = part_s - unit_s * ranks / schedule.stages  # of every sleep, however long
    cost = stage_cost(unit_s, schedule.stages // ranks)
    slow = dataclasses.replace(
        cost, forward_s=part_s, backward_s=cost.backward_s + late_s, input_grad_s=part_s,
        weight_grad_s=part_s, recompute_s=part_s,
    )  # fmt: skip
    programs = build_programs(Mesh(pp=ranks), schedule, pipeline(schedule))
    table = CostTable((slow,) * schedule.stages, latency_s, float("inf"), "measured")
    simulated_s = simulate(programs, table).step_s
    spans = [
        max(end for _, end in each) - min(start for start, _ in each)
        for each in zip(*(runs_s for _, runs_s in found), strict=True)
    ]
    return Cell(name, ranks, micro_batches, simulated_s, tuple(spans))


def train_gpt(schedule: str, steps: int) -> tuple[float, tuple[float, ...]]:
    """Predicted and measured seconds of a step of a small GPT-2, on this rank of two."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=256, n_positions=128, n_embd=256, n_layer=8, n_head=8, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    ids = torch.randint(256, (16, 128))
    batch = {"input_ids": ids, "labels": ids}
    model = merakc.auto_parallel(
        transformers.GPT2LMHeadModel(config), batch, dp=1, tp=1, pp=2, micro_batches=8,
        schedule=schedule,
    )  # fmt: skip
    seconds = []
    for _ in range(steps + 1):  # the first warms up
        dist.barrier()
        start_s = time.perf_counter()
        model(**batch).loss.backward()
        dist.barrier()
        seconds.append(time.perf_counter() - start_s)
        for parameter in model.parameters():
            parameter.grad = None
    assert model.simulation is not None
    return model.simulation.step_s, tuple(seconds[1:])


def measure_gpt(schedule: str, runs: int) -> Cell:
    """A step with real kernels."""
    (simulated_s, runs_s), _ = run_ranks(2, train_gpt, schedule, runs)
    return Cell(f"GPT-2, {schedule}", 2, 8, simulated_s, runs_s, REAL_BOUND)


def main(
    ranks: Annotated[str, typer.Option(help="Numbers of processes.")] = "4,8",
    schedules: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(NAMES),
    unit_s: Annotated[float, typer.Option(help="Seconds of a rank's forward.")] = 0.1,
    runs: Annotated[int, typer.Option(help="Of which the median counts.")] = 5,
    real: Annotated[bool, typer.Option(help="Train the GPT-2 too.")] = True,
    json_path: JsonPath = None,
) -> None:
    """Compares makespans; exits with 1 where one is more than 3 % off, or 10 % with kernels."""
    rows = [["p", "m", "schedule", "simulated", "median measured", "runs", "error"]]
    todo = [
        partial(measure, name, p, 2 * p, unit_s, runs)
        for p in map(int, ranks.split(","))
        for name in schedules.split(",")
    ]
    todo += [partial(measure_gpt, name, runs) for name in ("1f1b", "zb-h1") if real]
    cells = [make() for make in track(todo, "measuring", transient=True)]
    for cell in cells:
        colour = "green" if cell.passed else "red"
        spread = f"{min(cell.runs_s):.3f} to {max(cell.runs_s):.3f}"
        rows.append([
            str(cell.ranks), str(cell.micro_batches), cell.schedule, f"{cell.simulated_s:.3f} s",
            f"{cell.measured_s:.3f} s", spread, f"[{colour}]{cell.error:.2%}[/]",
        ])  # fmt: skip
    console = Console(width=110)
    title = "Makespan of a step with emulated compute and real messages"
    console.print(rich_table(rows, left=0, title=title))
    within = sum(cell.passed for cell in cells)
    good = within == len(cells)
    text = f"{within} of {len(cells)} within {BOUND:.0%}, or {REAL_BOUND:.0%} with real kernels"
    body = {"passed": good, "cells": cells}
    finish(console, good, text, json_path=json_path, figures=body)


if __name__ == "__main__":
    typer.run(main)
