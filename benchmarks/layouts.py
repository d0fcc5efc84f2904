"""Trains a case in one layout with merakc, and measures its distance from the reference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

import merakc
from benchmarks.models import ModelCase
from benchmarks.reference import split_batch, step_batch
from merakc.equality.casts import lifted_casts
from merakc.equality.compare import (
    Difference,
    Reference,
    Tensors,
    optimizer_for,
    pairs,
    split_state,
    worst_differences,
)
from merakc.ir.program import Mesh
from merakc.ir.state import ShardsGiven
from merakc.machines.cluster import Cluster


@dataclass(frozen=True, slots=True)
class Task:
    """What is trained, and how: `batch_size` samples over all dp ranks.

    With a `cluster`, what computes take is not measured first.
    """

    case: ModelCase
    mesh: Mesh
    batch_size: int
    micro_batches: int  # of the whole batch
    steps: int
    lift_casts: bool
    schedule: str = "1f1b"
    sequence_parallel: bool | None = None
    state_shards: ShardsGiven | None = None
    precision: str | None = None
    clip_norm: float | None = None
    cluster: Cluster | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # others of auto_parallel


def train_layout(task: Task) -> Reference:
    """One rank's part of the training; collective. Tensors are there on rank 0 only."""
    case, mesh = task.case, task.mesh
    model = case.model(torch.float64)
    dp_rank = mesh.coordinates(dist.get_rank())[0]
    losses: list[float] = []
    gradients: list[Tensors] = []
    batches = [
        split_batch(step_batch(case, task.batch_size, torch.float64, step), mesh.dp)[dp_rank]
        for step in range(task.steps)
    ]
    with lifted_casts() if task.lift_casts else nullcontext():
        parallel = merakc.auto_parallel(
            model,
            batches[0],
            dp=mesh.dp,
            tp=mesh.tp,
            **{"ep" if mesh.experts else "cp": mesh.cp},
            pp=mesh.pp,
            micro_batches=task.micro_batches // mesh.dp,
            schedule=task.schedule,
            sequence_parallel=task.sequence_parallel,
            state_shards=task.state_shards,
            precision=task.precision,
            cluster=task.cluster,
            **task.options,
        )
        optimizer = optimizer_for(parallel)
        for batch in batches:
            optimizer.zero_grad()
            loss = parallel(**batch)["loss"]
            loss.backward()
            if task.clip_norm is not None:
                parallel.clip_grad_norm_(task.clip_norm)
            losses.append(loss.item())
            gradients.append(parallel.full_gradients())
            optimizer.step()
        weights, buffers = split_state(model, parallel.full_state_dict())
    return Reference(tuple(losses), tuple(gradients), weights, buffers)


def train_twice(task: Task) -> tuple[Reference, str]:
    """The training, and the first thing in which a second one from the start is not bit-equal."""
    first, second = train_layout(task), train_layout(task)
    return first, first_inequality(first, second)


def first_inequality(first: Reference, second: Reference) -> str:
    """The name of the first loss or tensor that is not bit-equal; empty where all are."""
    if first.losses != second.losses:
        return f"losses {first.losses} and {second.losses}"
    for name, (one, other) in pairs(first, second).items():
        for key in one.keys() | other.keys():
            if key not in one or key not in other or not torch.equal(one[key], other[key]):
                return f"{name} of {key}"
    return ""


def worst_difference(
    ours: Reference, losses: Iterable[Sequence[float]], reference: Reference, bound: float
) -> Difference:
    """The largest of all `worst_differences`."""
    found = worst_differences(ours, losses, reference, bound)
    return max(found.values(), key=lambda difference: difference.error)
