"""`python -m benchmarks.emulated`: does a pipeline take the time that the simulator says?

Real ranks on gloo run the executor and its messages, with timed waits in the place of kernels, in
every schedule; the measured makespan is held against the simulated one. Then a small GPT is
trained with real kernels on two ranks, and its step time is held against the prediction from
measured kernels. Exits with 1 where the median of the runs is off by more than 3 %, or 10 %.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import transformers
import typer
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import merakc
from benchmarks.ranks import run_ranks
from merakc.ir.costs import CostTable, StageCost
from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorSpec
from merakc.ir.program import Chunk, Mesh, Program, Transfer
from merakc.ir.schedule import Schedule
from merakc.passes.recompute import checkpointed
from merakc.passes.schedule import build_programs
from merakc.passes.split_backward import split_backward
from merakc.runtime.executor import Executor
from merakc.runtime.groups import Groups
from merakc.schedules.registry import NAMES, make_schedule
from merakc.simulate import simulate

UNIT_S = 0.03  # of a forward of a whole rank
MAX_EMULATED_ERROR, MAX_REAL_ERROR = 0.03, 0.10
RUNS = 5
PINGS = 50
WIDTH = 1024  # elements of a message
SPEC, SCALAR = TensorSpec((WIDTH,), torch.float32), TensorSpec((1,), torch.float32)
WAIT = "merakc_benchmarks.wait.default"


def _wait(like: torch.Tensor, seconds: float) -> torch.Tensor:
    time.sleep(seconds)
    return like.clone()


torch.library.define("merakc_benchmarks::wait", "(Tensor like, float seconds) -> Tensor")
torch.library.impl("merakc_benchmarks::wait", "default", _wait)


def wait_chunk(stage: int, stages: int, seconds: StageCost) -> Chunk:
    """A stage that waits in the place of its computes, with one weight and one value kept.

    The value that is kept is what a recomputation makes again, as long as a forward takes. The
    backward of the first stage, which has no input to differentiate, is all weight gradient.
    """
    name = f"y{stage - 1}"
    x = (
        Input(name, InputKind.ACTIVATION, SPEC, name, True)
        if stage
        else Input("x", InputKind.BATCH, SPEC, "x")
    )
    last = stage == stages - 1
    kept = Output("kept", OutputKind.SAVED, Ref("h"))
    made = Output("loss" if last else f"y{stage}", OutputKind.ACTIVATION, Ref("out"))
    nodes = [
        Node("h", WAIT, (Ref(x.name), seconds.forward_s), (), (SPEC,)),
        Node("out", "aten.clone.default", (Ref("h"),), (), (SPEC,)),
    ]
    if last:
        nodes[-1] = Node("out", "aten.sum.default", (Ref("h"),), (), (TensorSpec((), SPEC.dtype),))
        made = replace(made, kind=OutputKind.LOSS)
    weight = Input("w", InputKind.PARAMETER, SCALAR, f"w{stage}", True)
    forward = Graph((x, weight), tuple(nodes), (made, kept))
    tangent = Input("t", InputKind.TANGENT, TensorSpec((), SPEC.dtype) if last else SPEC, made.name)
    saved = Input("saved", InputKind.SAVED, SPEC, "kept")
    wide = Node("wide", "aten.expand.default", (Ref("t"), (WIDTH,)), (), (SPEC,))
    dx = Node("dx", WAIT, (Ref("wide"), seconds.input_grad_s), (), (SPEC,))
    held = Node("held", "aten.mul.Tensor", (Ref("saved"), Ref("dx")), (), (SPEC,))
    dw = Node("dw", WAIT, (Ref("held"), seconds.weight_grad_s), (), (SPEC,))
    sum_ = Node("sum", "aten.sum.dim_IntList", (Ref("dw"), (0,), True), (), (SCALAR,))
    gradients = [Output("w", OutputKind.GRADIENT, Ref("sum"))]
    if stage:
        gradients.append(Output(name, OutputKind.GRADIENT, Ref("dx")))
    backward = Graph((tangent, saved), (wide, dx, held, dw, sum_), tuple(gradients))
    chunk = Chunk(forward, backward)
    input_grad, weight_grad = split_backward(chunk)
    return replace(checkpointed(chunk, ()), input_grad=input_grad, weight_grad=weight_grad)


@dataclass(frozen=True, slots=True)
class Case:
    """A schedule on emulated ranks."""

    name: str
    ranks: int
    schedule: Schedule
    costs: tuple[StageCost, ...]

    @property
    def programs(self) -> tuple[Program, ...]:
        """The actions of all ranks; every stage sends one value to the next."""
        transfers = [
            Transfer(f"y{s}", s, s + 1, 4 * WIDTH, grad=True)
            for s in range(self.schedule.stages - 1)
        ]
        return build_programs(Mesh(pp=self.ranks), self.schedule, transfers)


def waits(stages: int, ranks: int) -> StageCost:
    """Forward, input gradient, weight gradient and recomputation of a rank take a unit each."""
    unit_s = UNIT_S * ranks / stages
    return StageCost(unit_s, 2 * unit_s, unit_s, unit_s, unit_s)


def unit_costs(stages: int, ranks: int) -> tuple[StageCost, ...]:
    """What the computes of each stage take: both halves of the first stage's backward are one."""
    cost = waits(stages, ranks)
    first = replace(cost, input_grad_s=0.0, weight_grad_s=cost.backward_s)
    return (first, *[cost] * (stages - 1))


def cases(ranks: int, micro_batches: int) -> list[Case]:
    """Every known schedule, and 1F1B with recomputation."""
    made = {name: make_schedule(name, ranks, micro_batches) for name in NAMES}
    made["1f1b, recompute"] = make_schedule("1f1b", ranks, micro_batches, recompute="full")
    return [Case(name, ranks, s, unit_costs(s.stages, ranks)) for name, s in made.items()]


@dataclass(frozen=True, slots=True)
class Emulation:
    """What a rank measured: the seconds of a message, and start and end of each run."""

    latency_s: float
    spans_s: tuple[tuple[float, float], ...]


def emulate(case: Case, runs: int) -> Emulation:
    """The runs on this rank."""
    rank, mesh = dist.get_rank(), Mesh(pp=case.ranks)
    groups = Groups(mesh, rank)
    stages = [s for s, holder in enumerate(case.schedule.rank_of) if holder == rank]
    cost = waits(case.schedule.stages, case.ranks)
    chunks = {s: wait_chunk(s, case.schedule.stages, cost) for s in stages}
    state = {f"w{s}": torch.zeros(1) for s in stages}
    executor = Executor(
        case.programs[rank], chunks, state, torch.device("cpu"),
        channels=groups.channels(case.schedule.rank_of),
    )  # fmt: skip
    micro_batches = 1 + max(a.micro_batch for a in case.schedule.orders[0])
    batches = [{"x": torch.zeros(WIDTH)} for _ in range(micro_batches)]
    latency_s = _ping(rank)
    spans = []
    for _ in range(runs + 1):  # the first makes connections
        dist.barrier()
        start_s = time.monotonic()
        executor.run(batches)
        spans.append((start_s, time.monotonic()))
    return Emulation(latency_s, tuple(spans[1:]))


def _ping(rank: int) -> float:
    """Seconds of a message between ranks 0 and 1, on rank 0."""
    value = torch.zeros(WIDTH)
    seconds = []
    for _ in range(PINGS):
        start_s = time.perf_counter()
        if rank == 0:
            dist.send(value, 1)
            dist.recv(value, 1)
        elif rank == 1:
            dist.recv(value, 0)
            dist.send(value, 0)
        seconds.append((time.perf_counter() - start_s) / 2)
    return statistics.median(seconds)


@dataclass(frozen=True, slots=True)
class Result:
    """A measured makespan, the median of the runs, and the simulated one."""

    name: str
    ranks: int
    micro_batches: int
    simulated_s: float
    measured_s: float
    limit: float

    @property
    def error(self) -> float:
        """Relative to the simulated makespan."""
        return self.measured_s / self.simulated_s - 1

    @property
    def passed(self) -> bool:
        """Whether it is within the limit."""
        return abs(self.error) <= self.limit


def measure(case: Case, micro_batches: int, runs: int) -> Result:
    """Emulates a case on processes of its own."""
    found = run_ranks(case.ranks, partial(emulate, case, runs), timeout_s=300.0)
    spans = list(zip(*(e.spans_s for e in found), strict=True))
    measured = [max(end for _, end in span) - min(start for start, _ in span) for span in spans]
    table = CostTable(case.costs, found[0].latency_s, float("inf"), "measured")
    simulated_s = simulate(case.programs, table).step_s
    measured_s = statistics.median(measured)
    return Result(case.name, case.ranks, micro_batches, simulated_s, measured_s, MAX_EMULATED_ERROR)


def train_gpt(schedule: str, steps: int) -> tuple[float, float]:
    """Predicted and measured seconds of a step of a small GPT, on this rank of two."""
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
    return model.simulation.step_s, statistics.median(seconds[1:])


def results_table(results: Sequence[Result]) -> Table:
    """A row a case."""
    title = "Makespans in ms; m micro-batches"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("schedule", no_wrap=True)
    for name in ("ranks", "m", "simulated", "measured", "error", "limit"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in results:
        table.add_row(
            r.name, str(r.ranks), str(r.micro_batches), f"{r.simulated_s * 1e3:.1f}",
            f"{r.measured_s * 1e3:.1f}", f"{r.error:+.1%}", f"{r.limit:.0%}",
            style="" if r.passed else "red",
        )  # fmt: skip
    return table


def main(
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Also write the figures here.")
    ] = None,
    ranks: Annotated[str, typer.Option(help="Numbers of emulated ranks.")] = "4,8",
    runs: Annotated[int, typer.Option(help="Runs of each case.")] = RUNS,
    real: Annotated[bool, typer.Option(help="Train the GPT too.")] = True,
) -> None:
    """Measures every schedule; exits with 1 where one is off by more than its limit."""
    console = Console()
    results: list[Result] = []
    todo = [(case, 2 * p) for p in map(int, ranks.split(",")) for case in cases(p, 2 * p)]
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("", total=len(todo) + 2 * real)
        for case, micro_batches in todo:
            progress.update(bar, description=f"{case.name}, {case.ranks} ranks")
            results.append(measure(case, micro_batches, runs))
            progress.advance(bar)
        for schedule in ("1f1b", "zb-h1") if real else ():
            progress.update(bar, description=f"GPT, {schedule}")
            found = run_ranks(2, train_gpt, schedule, runs)
            predicted_s, measured_s = found[0]
            name = f"GPT-2, computing, {schedule}"
            results.append(Result(name, 2, 8, predicted_s, measured_s, MAX_REAL_ERROR))
            progress.advance(bar)
    console.print(results_table(results))
    missed = [r for r in results if not r.passed]
    console.print(
        f"{'missed' if missed else 'passed'}: {len(results) - len(missed)} of {len(results)} "
        "makespans are within their limit"
    )
    if json_path:
        json_path.write_text(json.dumps([dataclasses.asdict(r) for r in results], indent=1))
    raise typer.Exit(1 if missed else 0)


if __name__ == "__main__":
    typer.run(main)
