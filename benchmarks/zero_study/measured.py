"""ZeRO's stages on small mT5s, measured on ranks of this machine, beside what the cost model says.

The model is told what these ranks do, all at once: latency and bandwidth of gloo's collectives, the
share of their speed that they keep while the ranks compute, and seconds of a micro-batch and of the
optimizer. A stage's step is the median over rounds in which all stages take turns on the same
ranks, so that what else the machine does meets all alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from rich import box
from rich.table import Table

import merakc
from benchmarks.layouts import Task
from benchmarks.memory import peak_live_bytes
from benchmarks.models import Batch, ModelCase, unshifted, words
from benchmarks.ranks import run_ranks
from benchmarks.reference import split_batch
from benchmarks.resident_state import Held, resident_state
from benchmarks.zero_study.layers import graph_layers
from benchmarks.zero_study.models import Size, mt5
from merakc.analysis.buckets import BUCKET_BYTES, LEAST_BUCKETS, LEAST_BYTES
from merakc.costs.fabric import Fabric
from merakc.costs.state import DpGroup, Layer, Precision, state_bytes, state_cost
from merakc.equality.compare import optimizer_for
from merakc.frontend.record import record
from merakc.ir.program import ActionKind, Mesh
from merakc.ir.state import parse_shards
from merakc.machines.cluster import NOMINAL_CPU
from merakc.report.units import format_bytes
from merakc.train.expectations.trials import trial

STAGES = ("zero-0", "zero-1", "zero-2", "zero-3")
SINGLE = Precision(4, 4, 8)  # float32, and Adam's two states
VOCABULARY, SAMPLES, SOURCE_TOKENS, TARGET_TOKENS, MICRO_BATCHES = 4096, 4, 32, 16, 2
RANKS = (2, 4)
ROUNDS = 9
SMALL_BYTES, LARGE_BYTES = 64, 1 << 24
REPEATS = 5
TIMEOUT_S = 900.0
MAX_BYTES_ERROR = 0.02


SMALL = (Size("2M", 128, 256, 2, 2), Size("6M", 192, 512, 4, 3), Size("14M", 320, 832, 4, 5))


def case_of(size: Size) -> ModelCase:
    """The model and its batches; as published, the head is not tied."""

    def build(dropout: float) -> torch.nn.Module:
        return mt5(size, VOCABULARY, dropout)

    def batch(batch_size: int, generator: torch.Generator) -> Batch:
        return {
            "input_ids": words((batch_size, SOURCE_TOKENS), generator, VOCABULARY),
            "labels": words((batch_size, TARGET_TOKENS), generator, VOCABULARY),
        }

    return ModelCase(f"mT5 {size.name}", build, batch, unshifted)


@dataclass(frozen=True, slots=True)
class Machine:
    """What the ranks do, all at once. Seconds are of a micro-batch of one model."""

    fabric: Fabric
    overlap: float
    forward_s: float
    backward_s: float
    optimizer_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """A stage of one model on so many ranks. Seconds are of each round, bytes of rank 0.

    `held` is measured; `predicted_bytes` are the formula's of parameters, gradients and optimizer
    state. `peak_bytes` is the most that is alive in a step, activations included.
    """

    model: str
    stage: str
    ranks: int
    steps_s: tuple[float, ...]
    predicted_s: float
    held: Held
    predicted_bytes: int
    peak_bytes: int
    machine: Machine

    @property
    def step_s(self) -> float:
        """The median."""
        return statistics.median(self.steps_s)

    @property
    def held_bytes(self) -> int:
        """Measured parameters, gradients and optimizer state."""
        held = self.held
        return held.parameters_bytes + held.gradients_bytes + held.optimizer_bytes


def ratios(rows: Sequence[Row], stage: str) -> list[float]:
    """What a stage takes of stage 2's time in each round, of one model on so many ranks."""
    own = {row.stage: row.steps_s for row in rows}
    return [own_s / base_s for own_s, base_s in zip(own[stage], own["zero-2"], strict=True)]


def misses(rows: Sequence[Row]) -> list[str]:
    """What is not as it should be of one model on so many ranks."""
    where = f"mT5 {rows[0].model} on {rows[0].ranks} ranks"
    found = [
        f"{where}: {row.stage} holds {row.held_bytes} bytes of state, the formula says "
        f"{row.predicted_bytes}"
        for row in rows
        if abs(row.held_bytes / row.predicted_bytes - 1) > MAX_BYTES_ERROR
    ]
    slowdown = statistics.median(ratios(rows, "zero-3"))
    if slowdown <= 1:
        found.append(f"{where}: stage 3 takes {slowdown:.2f} of stage 2's time")
    return found


def measure(sizes: Sequence[Size], rounds: int) -> Iterator[list[Row]]:
    """The four rows of each model and number of ranks."""
    for size in sizes:
        for ranks in RANKS:
            yield run_ranks(ranks, measure_stages, size, rounds, timeout_s=TIMEOUT_S)[0]


def measure_stages(size: Size, rounds: int, stages: Sequence[str] = STAGES) -> list[Row]:
    """Several stages of one model on the ranks that are there; collective."""
    case, ranks = case_of(size), dist.get_world_size()
    whole = case.batch(SAMPLES * MICRO_BATCHES * ranks)
    batch = split_batch(whole, ranks)[dist.get_rank()]
    held = [
        resident_state(
            Task(
                case, Mesh(dp=ranks), SAMPLES * MICRO_BATCHES * ranks, MICRO_BATCHES * ranks,
                steps=0, lift_casts=False, schedule="1f1b", state_shards=stage,
            ),
            torch.float32,
        )
        for stage in stages
    ]  # fmt: skip
    trained = [Trained(case, batch, stage) for stage in stages]
    for one in trained:
        one.step()  # afterwards the optimizer has its state
    machine = measure_machine(trained[0])
    peaks = [peak_live_bytes(one.parallel, one.optimizer, one.step) for one in trained]
    steps_s: list[list[float]] = [[] for _ in trained]
    for _ in range(rounds):
        for own_s, one in zip(steps_s, trained, strict=True):
            own_s.append(seconds(one.step))
    layers = model_layers(case, split_batch(batch, MICRO_BATCHES)[0], machine)
    elements = sum(layer.parameters for layer in layers)
    rows = []
    for stage, own_s, peak, own in zip(stages, steps_s, peaks, held, strict=True):
        (shards,) = parse_shards(stage, ranks, 1)
        group = DpGroup(ranks, machine.fabric, overlap=machine.overlap)
        cost = state_cost(
            layers, MICRO_BATCHES, shards, group, SINGLE,
            optimizer_bytes_per_s=machine.optimizer_bytes_per_s,
        )  # fmt: skip
        predicted_bytes = state_bytes(elements, shards, SINGLE)
        rows.append(
            Row(
                size.name, stage, ranks, steps_s=tuple(own_s), predicted_s=cost.step_s, held=own,
                predicted_bytes=predicted_bytes, peak_bytes=peak, machine=machine,
            )
        )  # fmt: skip
    return rows


class Trained:
    """A model in one stage of ZeRO on this rank, and its optimizer."""

    def __init__(self, case: ModelCase, batch: Batch, stage: str) -> None:
        self.batch = batch
        self.parallel = merakc.auto_parallel(
            case.model(), batch, dp=dist.get_world_size(), tp=1, pp=1,
            micro_batches=MICRO_BATCHES, state_shards=stage, cluster=NOMINAL_CPU,
        )  # fmt: skip
        self.optimizer = optimizer_for(self.parallel)

    def backward(self) -> None:
        """A step up to the gradients."""
        self.optimizer.zero_grad()
        self.parallel(**self.batch)["loss"].backward()

    def step(self) -> None:
        """A whole step."""
        self.backward()
        self.optimizer.step()


def model_layers(case: ModelCase, part: Batch, machine: Machine) -> list[Layer]:
    """The model in buckets, whose seconds add up to the measured ones of a micro-batch."""
    model = case.model()
    share = sum(p.nbytes for p in model.parameters()) // LEAST_BUCKETS
    bucket_bytes = min(BUCKET_BYTES, max(LEAST_BYTES, share))  # as planned
    layers = graph_layers(record(model, (), part).graph, NOMINAL_CPU, bucket_bytes)
    forward = machine.forward_s / sum(layer.forward_s for layer in layers)
    backward = machine.backward_s / sum(layer.backward_s for layer in layers)
    return [
        Layer(layer.parameters, layer.forward_s * forward, layer.backward_s * backward)
        for layer in layers
    ]


def measure_machine(trained: Trained) -> Machine:
    """What the ranks do, of a model whose state is not sharded; collective."""
    steps = trained.parallel._own("_steps")
    (step,) = steps.compiled.values()
    found = [trial(steps, step, alone=True) for _ in range(2)][1]  # the first warms up
    assert found, "the stage does not run on zeros"
    (work_s,) = found.values()
    trained.backward()
    optimizer_s = median_seconds(trained.optimizer.step)
    elements = sum(p.numel() for p in trained.parallel.parameters())
    fabric = measure_fabric()
    return Machine(
        fabric,
        measure_overlap(),
        slowest(work_s[ActionKind.FORWARD]),
        slowest(work_s[ActionKind.BACKWARD]),
        2 * SINGLE.optimizer_bytes * elements / optimizer_s,
    )


def measure_fabric() -> Fabric:
    """Latency of a ring's step and bandwidth, from all-gathers and all-reduces of two sizes."""
    ranks = dist.get_world_size()
    small, large = (torch.zeros(size // 4) for size in (SMALL_BYTES, LARGE_BYTES))
    parts = large.chunk(ranks)
    latency_s = median_seconds(lambda: dist.all_reduce(small)) / (2 * (ranks - 1))
    reduce_s = median_seconds(lambda: dist.all_reduce(large))
    gather_s = median_seconds(lambda: dist.all_gather(list(parts), parts[dist.get_rank()].clone()))
    moved_bytes = 3 * (ranks - 1) / ranks * LARGE_BYTES  # twice by the one, once by the other
    wire_s = max(reduce_s + gather_s - 3 * (ranks - 1) * latency_s, 1e-6)
    bytes_per_s = moved_bytes / wire_s
    return Fabric(ranks, bytes_per_s, bytes_per_s, latency_s, latency_s)


def measure_overlap() -> float:
    """The share of its speed that a collective keeps while the ranks compute."""
    large, a = torch.zeros(LARGE_BYTES // 4), torch.randn(256, 256)
    alone_s = median_seconds(lambda: dist.all_reduce(large))
    once_s = median_seconds(lambda: torch.mm(a, a))
    times = max(1, int(alone_s / once_s / 2))  # half as long as the collective

    def compute() -> None:
        for _ in range(times):
            torch.mm(a, a)

    def both() -> None:
        work = dist.all_reduce(large, async_op=True)
        assert work is not None
        compute()
        work.wait()

    compute_s, both_s = median_seconds(compute), median_seconds(both)
    return min(1.0, max(0.0, (alone_s + compute_s - both_s) / compute_s))


def seconds(call: Callable[[], object]) -> float:
    """Of a call on all ranks, from the first that starts to the last that ends; collective."""
    dist.barrier()
    start_s = time.perf_counter()
    call()
    return slowest(time.perf_counter() - start_s)


def median_seconds(call: Callable[[], object]) -> float:
    """Of some calls after a first one; collective."""
    return statistics.median([seconds(call) for _ in range(REPEATS + 1)][1:])


def slowest(value_s: float) -> float:
    """The largest of all ranks' seconds; collective."""
    shared = torch.tensor(value_s, dtype=torch.float64)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return shared.item()


def measured_table(groups: Sequence[Sequence[Row]]) -> Table:
    """A row a model, ranks and stage."""
    table = Table(
        title="Small mT5s on this machine: medians, and what the cost model says",
        caption="to stage 2: median (least to largest) over rounds; state, formula: of a rank",
        box=box.SIMPLE_HEAD,
    )
    for name in ("mT5", "ranks", "ZeRO"):
        table.add_column(name)
    for name in ("step", "to stage 2", "predicted", "state", "formula", "gathered", "peak"):
        table.add_column(name, justify="right")
    for rows in groups:
        for row in rows:
            sizes = row.held_bytes, row.predicted_bytes, row.held.gathered_bytes, row.peak_bytes
            table.add_row(
                row.model, str(row.ranks), row.stage.removeprefix("zero-"),
                f"{row.step_s * 1e3:.0f} ms", _spread(ratios(rows, row.stage)),
                f"{row.predicted_s * 1e3:.0f} ms",
                *map(format_bytes, sizes), end_section=row is rows[-1],
            )  # fmt: skip
    return table


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
