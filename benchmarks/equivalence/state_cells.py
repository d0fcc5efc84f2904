"""The cells of the table of sharded state: what is trained, weighed and compared with DDP."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from benchmarks.equivalence.cells import BATCH_SIZE, BOUND, Cell, run_cell
from benchmarks.equivalence.ddp_equality import RANKS, unequal_to_ddp
from benchmarks.equivalence.uneven import UNEVEN
from benchmarks.layouts import Task, train_layout, worst_difference
from benchmarks.models import MODELS
from benchmarks.ranks import run_ranks
from benchmarks.reference import train_reference
from benchmarks.resident_state import Held, resident_state
from merakc.costs.state import MIXED, Precision
from merakc.equality.compare import Reference
from merakc.ir.program import Mesh
from merakc.ir.state import StateShards, lattice, parse_shards

CASES = {**{name: MODELS[name] for name in ("gpt2", "t5", "llama", "vit")}, UNEVEN.name: UNEVEN}
DP = 4
MESHES = {"tp = 2": Mesh(DP, 2, 1), "pp = 2": Mesh(DP, 1, 2)}
MICRO_BATCHES, STEPS = 8, 5  # two micro-batches a dp rank
BYTES_BOUND = 0.02
CLIP_NORM = 0.5  # below the norm of every step
DOUBLE = Precision(8, 8, 16)  # Adam keeps two states
# Pairs of shards for two stages, of all kinds: none, the optimizer's, all, other numbers.
STAGED = (
    ((1, 1, 1), (4, 4, 4)), ((1, 1, 4), (2, 2, 2)), ((4, 4, 4), (1, 2, 2)), ((2, 4, 4), (1, 1, 2)),
)  # fmt: skip


@dataclass(frozen=True)
class StateCell(Cell):
    """One model, sharded in one way on one mesh. `shards` are those of each stage.

    `error` is None where no training was compared, `held` empty where nothing was weighed.
    """

    model: str
    mesh: str
    shards: tuple[StateShards, ...]
    clip_norm: float | None = None
    precision: str | None = None
    held: tuple[Held, ...] = ()

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
        near = self.error is None or self.near
        return near and not self.failed and all(self.byte_error(k) <= BYTES_BOUND for k in KINDS)

    @property
    def complaint(self) -> str:
        """What is out of its bound."""
        over = {k: e for k in KINDS if (e := self.byte_error(k)) > BYTES_BOUND}
        texts = [super().complaint, *(f"the bytes of {k} by {e:.2%}" for k, e in over.items())]
        return "; ".join(filter(None, texts))


_SINGULAR = {"parameters": "parameter", "gradients": "gradient", "optimizer": "optimizer"}
KINDS = tuple(_SINGULAR)


@dataclass(frozen=True)
class Equality(Cell):
    """One model on two ranks against `DistributedDataParallel`."""

    model: str
    shards: StateShards
    micro_batches: int

    @property
    def passed(self) -> bool:
        """Whether every bit is equal."""
        return not self.complaint


def all_cells(quick: bool) -> list[StateCell]:
    """What is measured; `quick` is one cell of each kind."""
    points = list(lattice(DP))
    chosen = points[-1:] if quick else points
    models = ("gpt2",) if quick else ("gpt2", "t5", UNEVEN.name)
    cells = [
        StateCell(model, mesh, _stages(mesh, s))
        for model in models
        for mesh in MESHES
        for s in chosen
    ]
    staged = STAGED[:1] if quick else STAGED
    cells += [
        StateCell(model, "pp = 2", parse_shards(pair, DP, 2)) for model in models for pair in staged
    ]
    clipped = ["pp = 2"] if quick else list(MESHES)
    cells += [
        StateCell("gpt2", mesh, _stages(mesh, s), clip_norm=CLIP_NORM)
        for mesh in clipped
        for s in chosen
    ]
    return cells + [
        StateCell("llama", mesh, _stages(mesh, s), precision="bf16-mixed")
        for mesh in clipped
        for s in chosen
    ]


def _stages(mesh: str, shards: StateShards) -> tuple[StateShards, ...]:
    return (shards,) * MESHES[mesh].pp


def measure_cell(cell: StateCell, timeout_s: float) -> StateCell:
    """Trains and weighs one cell on forked ranks."""
    return run_cell(cell, partial(_measure, cell, timeout_s))


def _measure(cell: StateCell, timeout_s: float) -> dict[str, Any]:
    mesh, case = MESHES[cell.mesh], CASES[cell.model]
    given = [s.counts for s in cell.shards]
    task = Task(
        case, mesh, BATCH_SIZE, MICRO_BATCHES, STEPS, case.casts_float32, state_shards=given,
        clip_norm=cell.clip_norm, precision=cell.precision, schedule="1f1b",
    )  # fmt: skip
    found = run_ranks(mesh.world_size, _run, task, cell, timeout_s=timeout_s)
    results = [result for result, _ in found if result is not None]
    fields: dict[str, Any] = {"held": tuple(held for _, held in found if held is not None)}
    if results:
        reference = _reference(cell.model, cell.clip_norm)
        losses = [result.losses for result in results]
        fields["error"] = worst_difference(results[0], losses, reference, BOUND)
    return fields


def _run(task: Task, cell: StateCell) -> tuple[Reference | None, Held | None]:
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


def measure_equality(cell: Equality, timeout_s: float) -> Equality:
    """Trains on two forked ranks, by merakc and by torch."""

    def compare() -> dict[str, Any]:
        args = CASES[cell.model], cell.shards, cell.micro_batches, STEPS
        found = run_ranks(RANKS, unequal_to_ddp, *args, timeout_s=timeout_s)
        return {"unequal": next(filter(None, found), "")}

    return run_cell(cell, compare)
