"""Whether a model trains on a device as it does eagerly there, in one process."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree

from merakc.api import auto_parallel
from merakc.equality.compare import KINDS, Reference, optimizer_for, split_state, worst_differences
from merakc.equality.plain import train_plain
from merakc.equality.ranks import run_ranks
from merakc.equality.train import comparable
from merakc.gpu_check.models import MODELS
from merakc.gpu_check.through_host import through_host
from merakc.machines.cluster import NOMINAL_GPU

SAMPLES, STEPS = 8, 2


def _batches(name: str, dtype: torch.dtype, device: torch.device) -> list[Any]:
    def brought(x: torch.Tensor) -> torch.Tensor:
        return x.to(device, dtype if x.is_floating_point() else None)

    made = (MODELS[name].batch(SAMPLES, seed) for seed in range(STEPS))
    return [pytree.tree_map(brought, batch) for batch in made]


def _on_cpu(found: Reference) -> Reference:
    gradients = tuple({n: g.cpu() for n, g in step.items()} for step in found.gradients)
    of = ({n: t.cpu() for n, t in each.items()} for each in (found.weights, found.buffers))
    return Reference(found.losses, gradients, *of)


def eager(name: str, dtype: torch.dtype, device: torch.device) -> Reference:
    """The plain training."""
    model = MODELS[name].build().to(device, dtype)
    steps = [[((), batch)] for batch in _batches(name, dtype, device)]
    return _on_cpu(train_plain(model, steps, [[1.0]] * STEPS, writing_parts=1))


def ours(name: str, dtype: torch.dtype, device: torch.device, **options: Any) -> Reference:
    """Merakc's training, on this rank; collective. Tensors are there on rank 0 only."""
    model = MODELS[name].build().to(dtype)
    batches = _batches(name, dtype, torch.device("cpu"))
    rank = dist.get_rank() if dist.is_initialized() else 0
    dp = options.get("dp", 1)
    pieces = (dist.get_world_size() if dist.is_initialized() else 1) // dp
    losses, gradients = [], []
    parallel = None
    for batch in batches:
        own = {key: value.chunk(dp)[rank // pieces] for key, value in batch.items()}
        if parallel is None:
            given = {"cluster": NOMINAL_GPU, "device": device, **options}
            parallel = auto_parallel(model, own, **given)
            optimizer = optimizer_for(parallel)
        optimizer.zero_grad()
        loss = parallel(**own).loss
        loss.backward()
        losses.append(loss.item())
        gradients.append({n: g.cpu() for n, g in parallel.full_gradients().items()})
        optimizer.step()
    assert parallel is not None
    state = {n: t.cpu() for n, t in parallel.full_state_dict().items()}
    return Reference(tuple(losses), tuple(gradients), *split_state(parallel, state))


def compare(
    name: str, ranks: int = 1, dtype: str = "float64", device: str = "cuda:0", **options: Any
) -> dict[str, float]:
    """The largest relative difference of each kind; ranks share a GPU, through their host."""
    place, number = torch.device(device), getattr(torch, dtype)

    def run() -> tuple[Reference, Reference | None]:
        with comparable(lift=number is torch.float64):
            with through_host() if place.type == "cuda" and ranks > 1 else nullcontext():
                mine = ours(name, number, place, **options)
            first = not dist.is_initialized() or dist.get_rank() == 0
            return mine, eager(name, number, place) if first else None

    every = [run()] if ranks == 1 else run_ranks(ranks, run, timeout_s=150.0)
    found, wanted = every[0]
    assert wanted is not None
    losses = [own.losses for own, _ in every]
    bound = 1e-10 if number is torch.float64 else 1e-5
    worst = worst_differences(found, losses, wanted, bound)
    return {kind: worst[kind].error for kind in KINDS if kind in worst}
