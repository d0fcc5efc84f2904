"""Trains a case in one layout with merakc, and measures its distance from the reference."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

import merakc
from benchmarks.models import ModelCase
from benchmarks.reference import (
    LEARNING_RATE,
    Reference,
    Tensors,
    lifted_casts,
    optimizer_for,
    split_batch,
    split_state,
    step_batch,
)
from merakc.ir.program import Mesh
from merakc.ir.state import ShardsGiven

# A gradient below this share of the bound, relative to the largest gradient, is zero in theory
# (the bias of an attention's keys) and rounding in practice, and so is a buffer (the mean of what a
# norm has just centred). It has no digits to compare; that it stays as small is what can be asked.
ZERO_SHARE = 1e-2


@dataclass(frozen=True, slots=True)
class Task:
    """What is trained, and how: `batch_size` samples over all dp ranks."""

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


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest relative difference, and of what."""

    error: float
    name: str


def train_layout(task: Task) -> Reference:
    """One rank's part of the training; collective. Tensors are there on rank 0 only."""
    case, mesh = task.case, task.mesh
    model = case.model(torch.float64)
    dp_rank = mesh.coordinates(dist.get_rank())[0]
    losses: list[float] = []
    gradients: list[Tensors] = []
    with lifted_casts() if task.lift_casts else nullcontext():
        batches = [
            split_batch(step_batch(case, task.batch_size, torch.float64, step), mesh.dp)[dp_rank]
            for step in range(task.steps)
        ]
        parallel = merakc.auto_parallel(
            model,
            batches[0],
            dp=mesh.dp,
            tp=mesh.tp,
            pp=mesh.pp,
            micro_batches=task.micro_batches // mesh.dp,
            schedule=task.schedule,
            sequence_parallel=task.sequence_parallel,
            state_shards=task.state_shards,
            precision=task.precision,
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
    for name, (one, other) in _pairs(first, second).items():
        for key in one.keys() | other.keys():
            if key not in one or key not in other or not torch.equal(one[key], other[key]):
                return f"{name} of {key}"
    return ""


def worst_difference(
    ours: Reference, losses: list[tuple[float, ...]], reference: Reference, bound: float
) -> Difference:
    """The largest relative difference of rank 0's tensors and of every rank's losses.

    Differences are relative to the largest element of the reference's tensor; of a gradient or
    buffer that is zero in theory, see `ZERO_SHARE`; of a weight, at least to the distance that the
    optimizer can have moved it.
    """
    found = [
        Difference(_relative(abs(a - b), abs(b)), f"loss of step {step}, rank {rank}")
        for rank, steps in enumerate(losses)
        for step, (a, b) in enumerate(zip(steps, reference.losses, strict=True))
    ]
    zero = bound * ZERO_SHARE
    reach = LEARNING_RATE * len(reference.losses)
    for name, (got, wanted) in _pairs(ours, reference).items():
        sizes = (_size(t) for t in wanted.values() if t.is_floating_point())
        largest = max(sizes, default=0.0)
        for key in wanted.keys() | got.keys():
            scale = _size(wanted[key]) if key in wanted else 0.0
            if name == "weight":
                scale = max(scale, reach)
            elif scale < zero * largest:
                scale = ZERO_SHARE * largest
            found.append(Difference(_error(key, got, wanted, scale), f"{name} of {key}"))
    return max(found, key=lambda difference: difference.error)


def _error(key: str, got: Tensors, wanted: Tensors, scale: float) -> float:
    """The relative difference of one tensor; infinite where it is missing or misshapen."""
    if key not in got or (key in wanted and got[key].shape != wanted[key].shape):
        return math.inf
    expected = wanted.get(key, torch.zeros(()))  # a parameter that the loss does not depend on
    return _relative(_size(got[key].double() - expected.double()), scale)


def _relative(difference: float, scale: float) -> float:
    if not math.isfinite(difference):
        return math.inf
    if difference == 0:
        return 0.0
    return difference / scale if scale > 0 else math.inf


def _size(tensor: torch.Tensor) -> float:
    """The largest absolute element."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _pairs(one: Reference, other: Reference) -> Mapping[str, tuple[Tensors, Tensors]]:
    """Everything but the losses, by a name to report it by."""
    steps = enumerate(zip(one.gradients, other.gradients, strict=True))
    return {
        **{f"gradient of step {step}": pair for step, pair in steps},
        "weight": (one.weights, other.weights),
        "buffer": (one.buffers, other.buffers),
    }
