"""Sharded state against torch's `DistributedDataParallel` on the same ranks, bit by bit.

A sum of two is the same in any order, and a power of two scales without rounding: on two ranks,
with as many labels on each as a power of two, nothing is left in which two right programs may
differ but the order in which micro-batches are added. That follows from the shards: where gradients
are sharded, every micro-batch's are reduced and then added; elsewhere they are added and then
reduced. One thing is lifted for it: calls that add a gradient to the sum of others while they make
it (`merakc.analysis.accumulation`), which round its last bit otherwise than a sum that follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import merakc
from benchmarks.models import IGNORED, Batch, ModelCase
from benchmarks.reference import split_batch, step_batch
from merakc.equality.casts import lifted_casts
from merakc.equality.compare import Tensors, optimizer_for
from merakc.ir.state import StateShards

RANKS = 2
BATCH_SIZE = 8
LABELS = 8  # of a sample: a power of two, and fewer than the positions that any model predicts


def even_batch(case: ModelCase, step: int) -> Batch:
    """A batch of `case` in which every sample of a text has `LABELS` labels and no padding."""
    batch = step_batch(case, BATCH_SIZE, torch.float64, step)
    labels = batch.get("labels")
    if labels is None or labels.dim() == 1:
        return batch
    generator = torch.Generator().manual_seed(step)
    words = torch.randint(3, 100, labels.shape, generator=generator)
    words[:, 0] = IGNORED  # a causal loss never reads the first
    words[:, 1 + LABELS :] = IGNORED
    return {
        "input_ids": torch.randint(3, 100, batch["input_ids"].shape, generator=generator),
        "attention_mask": torch.ones_like(batch["attention_mask"]),
        "labels": words,
    }


def train_ddp(
    case: ModelCase, batches: Sequence[Batch], micro_batches: int, *, reduce_each: bool
) -> tuple[list[Tensors], Tensors]:
    """The gradients of each step and the weights at the end, of this rank's batches; collective.

    With `reduce_each` every micro-batch's gradients are reduced, and added up afterwards.
    """
    model = case.model(torch.float64)
    parallel = DistributedDataParallel(model)
    optimizer = optimizer_for(model)
    found: list[Tensors] = []
    for batch in batches:
        sums: Tensors = {}
        optimizer.zero_grad()
        for k, part in enumerate(split_batch(batch, micro_batches)):
            alone = reduce_each or k == micro_batches - 1
            with nullcontext() if alone else parallel.no_sync():
                (parallel(**part)["loss"] / micro_batches).backward()
            if reduce_each:
                for name, parameter in model.named_parameters():
                    if parameter.grad is not None:
                        sums[name] = sums[name] + parameter.grad if k else parameter.grad.clone()
                        parameter.grad = sums[name] if k == micro_batches - 1 else None
        found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    return found, {n: p.detach().clone() for n, p in model.named_parameters()}


def added_apart() -> AbstractContextManager[object]:
    """While it is entered, gradients are compiled to be made and then added, as autograd does."""
    return patch("merakc.runtime.pieces.accumulated", return_value={})


def unequal_to_ddp(case: ModelCase, shards: StateShards, micro_batches: int, steps: int) -> str:
    """The first gradient or weight in which `steps` steps are not bit-equal to DDP's; collective.

    Empty where all are, and on ranks other than 0.
    """
    with lifted_casts(), added_apart():
        batches = [split_batch(even_batch(case, k), RANKS)[dist.get_rank()] for k in range(steps)]
        gradients, weights = train_ddp(
            case, batches, micro_batches, reduce_each=shards.gradients > 1
        )
        counts = shards.parameters, shards.gradients, shards.optimizer
        parallel = merakc.auto_parallel(
            case.model(torch.float64), batches[0], dp=RANKS, tp=1, pp=1,
            micro_batches=micro_batches, state_shards=counts,
        )  # fmt: skip
        optimizer = optimizer_for(parallel)
        unequal = ""
        for step, batch in enumerate(batches):
            optimizer.zero_grad()
            parallel(**batch)["loss"].backward()
            own = parallel.full_gradients()
            unequal = unequal or _unequal(f"gradient of step {step} of", own, gradients[step])
            optimizer.step()
        whole = parallel.full_state_dict()
        return unequal or _unequal("weight", whole, weights)


def _unequal(kind: str, own: Tensors, wanted: Tensors) -> str:
    """The first of `wanted` that `own`, which only rank 0 has, does not have bit by bit."""
    if dist.get_rank():
        return ""
    for name, value in wanted.items():
        if name not in own or not torch.equal(own[name], value):
            missing = name not in own
            gap = "is missing" if missing else f"{float((own[name] - value).abs().max()):.1e}"
            return f"{kind} {name}: {gap}"
    return ""
