"""Whether a model trains on a device as it does eagerly there, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree

from merakc.api import auto_parallel
from merakc.equality.compare import (
    KINDS,
    Reference,
    Tensors,
    optimizer_for,
    split_state,
    worst_differences,
)
from merakc.equality.plain import train_plain
from merakc.equality.ranks import run_ranks
from merakc.equality.train import comparable
from merakc.gpu_check.models import MODELS, Batch
from merakc.gpu_check.through_host import through_host
from merakc.machines.cluster import NOMINAL_GPU
from merakc.passes.forward import scores

CPU = torch.device("cpu")
SAMPLES, STEPS = 8, 2
# Of float64 with casts lifted, of float32 (with other orders of sums), and of half precision.
LIMITS = {"float64": 1e-10, "float32": 5e-5, "bfloat16": 1e-1}


def allowed(dtype: str = "float64", precision: str | None = None, **_: Any) -> float:
    """The largest relative difference that is rounding."""
    return LIMITS["bfloat16" if precision else dtype]


def _batches(name: str, dtype: torch.dtype, device: torch.device) -> list[Batch]:
    def brought(x: torch.Tensor) -> torch.Tensor:
        return x.to(device, dtype if x.is_floating_point() else None)

    made = (MODELS[name].batch(SAMPLES, seed) for seed in range(STEPS))
    return [pytree.tree_map(brought, batch) for batch in made]


def eager(name: str, dtype: torch.dtype, device: torch.device) -> Reference:
    """The plain training; its tensors on the CPU."""
    model = MODELS[name].build().to(device, dtype)
    steps = [[((), batch)] for batch in _batches(name, dtype, device)]
    return _on_cpu(train_plain(model, steps, [[1.0]] * STEPS, writing_parts=1))


def ours(name: str, dtype: torch.dtype, device: torch.device, **options: Any) -> Reference:
    """What merakc trains, on this rank; collective. Tensors are there on rank 0 only."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    dp = options.get("dp", 1)
    batches = [
        {key: value.chunk(dp)[rank // (ranks // dp)] for key, value in batch.items()}
        for batch in _batches(name, dtype, CPU)
    ]
    given = {"cluster": NOMINAL_GPU, "device": device, **options}
    model = auto_parallel(MODELS[name].build().to(dtype), batches[0], **given)
    optimizer = optimizer_for(model)
    losses, gradients = [], []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        losses.append(loss.item())
        gradients.append(model.full_gradients())
        optimizer.step()
    state = split_state(model, model.full_state_dict())
    return _on_cpu(Reference(tuple(losses), tuple(gradients), *state))


def _on_cpu(found: Reference) -> Reference:
    def brought(tensors: Tensors) -> Tensors:
        return {name: tensor.cpu() for name, tensor in tensors.items()}

    gradients = tuple(brought(of_step) for of_step in found.gradients)
    return Reference(found.losses, gradients, brought(found.weights), brought(found.buffers))


@contextmanager
def _blocks_from(least_bytes: int | None) -> Iterator[None]:
    """While it is entered, losses of more bytes of scores than these are computed in blocks."""
    if least_bytes is None:
        yield
        return
    with patch.object(scores, "LEAST_BYTES", least_bytes):
        yield


def compare(
    name: str,
    *,
    device: str,
    ranks: int = 1,
    dtype: str = "float64",
    whole_scores_bytes: int | None = None,
    **options: Any,
) -> dict[str, float]:
    """The largest relative difference of each kind.

    Each rank has a GPU of its own where there are as many; elsewhere they share the first, and what
    they exchange goes through their host.
    """
    number, lift = getattr(torch, dtype), dtype == "float64"
    apart = device == "cuda" and 1 < ranks <= torch.cuda.device_count()
    shared = device == "cuda" and ranks > 1 and not apart

    def run() -> tuple[Reference, Reference | None]:
        rank = dist.get_rank() if dist.is_initialized() else 0
        place = torch.device("cuda", rank if apart else 0) if device == "cuda" else CPU
        with comparable(lift=lift):
            with through_host() if shared else nullcontext(), _blocks_from(whole_scores_bytes):
                mine = ours(name, number, place, **options)
            return mine, eager(name, number, place) if not rank else None

    backend = "cpu:gloo,cuda:nccl" if apart else "gloo"
    every = [run()] if ranks == 1 else run_ranks(ranks, run, timeout_s=150.0, backend=backend)
    found, wanted = every[0]
    assert wanted is not None, "rank 0 trains the plain model too"
    losses = [own.losses for own, _ in every]
    worst = worst_differences(found, losses, wanted, allowed(dtype, options.get("precision")))
    return {kind: worst[kind].error for kind in KINDS if kind in worst}
