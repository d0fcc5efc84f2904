"""The cells of `benchmarks.state_equivalence`: what is trained, weighed and compared with DDP."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from functools import cache

import torch

from benchmarks.ddp_equality import RANKS, unequal_to_ddp
from benchmarks.layouts import Difference, Task, train_layout, worst_difference
from benchmarks.models import MODELS
from benchmarks.ranks import RankError, RankTimeoutError, run_ranks
from benchmarks.reference import Reference, train_reference
from benchmarks.resident_state import Held, resident_state
from benchmarks.uneven import UNEVEN
from merakc.costs.state import MIXED, Precision
from merakc.ir.program import Mesh
from merakc.ir.state import StateShards, lattice, parse_shards

CASES = {**{name: MODELS[name] for name in ("gpt2", "t5", "llama", "vit")}, UNEVEN.name: UNEVEN}
DP = 4
MESHES = {"tp = 2": Mesh(DP, 2, 1), "pp = 2": Mesh(DP, 1, 2)}
BATCH_SIZE, MICRO_BATCHES, STEPS = 8, 8, 5  # two micro-batches a dp rank
BOUND = 1e-10
BYTES_BOUND = 0.02
CLIP_NORM = 0.5  # below the norm of every step
DOUBLE = Precision(8, 8, 16)  # Adam keeps two states
# Pairs of shards for two stages, of all kinds: none, the optimizer's, all, other numbers.
STAGED = (
    ((1, 1, 1), (4, 4, 4)), ((1, 1, 4), (2, 2, 2)), ((4, 4, 4), (1, 2, 2)), ((2, 4, 4), (1, 1, 2)),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cell:
    """One model, sharded in one way on one mesh. `shards` are those of each stage.

    `error` is None where no training was compared, `held` empty where nothing was weighed.
    """

    model: str
    mesh: str
    shards: tuple[StateShards, ...]
    clip_norm: float | None = None
    precision: str | None = None
    error: Difference | None = None
    held: tuple[Held, ...] = ()
    failed: str = ""
    seconds: float = 0.0

    def byte_error(self, kind: str) -> float:
        """The largest relative difference of a rank's bytes from the formula."""
        found = (getattr(held, f"{kind}_bytes") / self._wanted(held, kind) for held in self.held)
        return max((abs(share - 1) for share in found), default=0.0)

    def _wanted(self, held: Held, kind: str) -> float:
        """Bytes of a rank by the formula; what stages share is sharded as the first has it."""
        formula = MIXED if self.precision else DOUBLE
        size_bytes: int = getattr(formula, f"{_SINGULAR[kind]}_bytes")
        return size_bytes * sum(
            count / getattr(self.shards[rank], kind) for rank, count in held.elements.items()
        )

    def share(self, kind: str) -> float:
        """The most that a rank holds of a kind, in shares of the bytes of its whole parameters."""
        formula = MIXED if self.precision else DOUBLE
        return max(
            getattr(h, f"{kind}_bytes") / (formula.parameter_bytes * sum(h.elements.values()))
            for h in self.held
        )

    @property
    def padding(self) -> int:
        """Elements that a rank's shards of parameters hold beside these, at most."""
        formula = MIXED if self.precision else DOUBLE
        more = (held.parameters_bytes - self._wanted(held, "parameters") for held in self.held)
        return round(max(more) / formula.parameter_bytes)

    @property
    def passed(self) -> bool:
        """Whether everything that was measured is within its bound."""
        near = self.error is None or self.error.error <= BOUND
        return near and not self.failed and all(self.byte_error(k) <= BYTES_BOUND for k in KINDS)


_SINGULAR = {"parameters": "parameter", "gradients": "gradient", "optimizer": "optimizer"}
KINDS = tuple(_SINGULAR)


@dataclass(frozen=True, slots=True)
class Equality:
    """One model on two ranks against `DistributedDataParallel`; `unequal` is empty if equal."""

    model: str
    shards: StateShards
    micro_batches: int
    unequal: str = ""

    @property
    def passed(self) -> bool:
        """Whether every bit is equal."""
        return not self.unequal


def all_cells(quick: bool) -> list[Cell]:
    """What is measured; `quick` is one cell of each kind."""
    points = list(lattice(DP))
    chosen = points[-1:] if quick else points
    models = ("gpt2",) if quick else ("gpt2", "t5", UNEVEN.name)
    cells = [
        Cell(model, mesh, _stages(mesh, s)) for model in models for mesh in MESHES for s in chosen
    ]
    staged = STAGED[:1] if quick else STAGED
    cells += [
        Cell(model, "pp = 2", parse_shards(pair, DP, 2)) for model in models for pair in staged
    ]
    clipped = ["pp = 2"] if quick else list(MESHES)
    cells += [
        Cell("gpt2", mesh, _stages(mesh, s), clip_norm=CLIP_NORM)
        for mesh in clipped
        for s in chosen
    ]
    return cells + [
        Cell("llama", mesh, _stages(mesh, s), precision="bf16-mixed")
        for mesh in clipped
        for s in chosen
    ]


def _stages(mesh: str, shards: StateShards) -> tuple[StateShards, ...]:
    return (shards,) * MESHES[mesh].pp


def measure_cell(cell: Cell, timeout_s: float) -> Cell:
    """Trains and weighs one cell on forked ranks."""
    start_s = time.perf_counter()
    mesh, case = MESHES[cell.mesh], CASES[cell.model]
    given = [dataclasses.astuple(s) for s in cell.shards]
    task = Task(
        case, mesh, BATCH_SIZE, MICRO_BATCHES, STEPS, case.casts_float32, state_shards=given,
        clip_norm=cell.clip_norm, precision=cell.precision, schedule="1f1b",
    )  # fmt: skip
    try:
        found = run_ranks(mesh.world_size, _run, task, cell, timeout_s=timeout_s)
        results = [result for result, _ in found if result is not None]
        held = tuple(held for _, held in found if held is not None)
        cell = dataclasses.replace(cell, held=held)
        if results:
            reference = _reference(cell.model, cell.clip_norm)
            losses = [result.losses for result in results]
            error = worst_difference(results[0], losses, reference, BOUND)
            cell = dataclasses.replace(cell, error=error)
    except (RankError, RankTimeoutError) as failure:
        cell = dataclasses.replace(cell, failed=str(failure))
    return dataclasses.replace(cell, seconds=time.perf_counter() - start_s)


def _run(task: Task, cell: Cell) -> tuple[Reference | None, Held | None]:
    """One rank's part. Of the uneven model, which is all padding, nothing is weighed."""
    trained = None if cell.precision else train_layout(task)
    held = None
    if cell.clip_norm is None and task.case is not UNEVEN:
        held = resident_state(task, torch.float32 if cell.precision else torch.float64)
    return trained, held


@cache
def _reference(model: str, clip_norm: float | None) -> Reference:
    case = CASES[model]
    return train_reference(
        case, batch_size=BATCH_SIZE, micro_batches=MICRO_BATCHES, steps=STEPS,
        lift_casts=case.casts_float32, clip_norm=clip_norm,
    )  # fmt: skip


def all_equalities(quick: bool) -> list[Equality]:
    """What is compared with `DistributedDataParallel`."""
    models = ("gpt2",) if quick else ("gpt2", "t5", "llama", "vit", UNEVEN.name)
    points = list(lattice(RANKS))
    return [
        Equality(model, shards, micro_batches)
        for model in models
        for micro_batches in ((2,) if quick else (1, 2))
        for shards in (points[-1:] if quick else points)
    ]


def measure_equality(found: Equality, timeout_s: float) -> Equality:
    """Trains on two forked ranks, by merakc and by torch."""
    args = CASES[found.model], found.shards, found.micro_batches, STEPS
    try:
        unequal = next(
            filter(None, run_ranks(RANKS, unequal_to_ddp, *args, timeout_s=timeout_s)), ""
        )
    except (RankError, RankTimeoutError) as failure:
        unequal = str(failure)
    return dataclasses.replace(found, unequal=unequal)
