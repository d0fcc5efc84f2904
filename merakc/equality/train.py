"""One training on local ranks under a plan, and the same in one process."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from merakc.api import auto_parallel
from merakc.batch_objects import closed
from merakc.batches import call_arguments, named_tensors, split_batch
from merakc.cluster import NOMINAL_CPU
from merakc.equality.casts import lifted_casts, without_dropout
from merakc.equality.compare import Reference, Tensors, optimizer_for, split_state
from merakc.equality.plain import Call, train_plain
from merakc.errors import ConfigError
from merakc.frontend.results import find_loss
from merakc.ir.batches import BatchDims
from merakc.ir.plan import Plan


@dataclass(frozen=True)
class Case:
    """What both sides train: a model in float64, a plan for it, a whole batch for each step.

    With `lift`, casts to float32 in the model's own code are lifted to float64.
    """

    model: nn.Module
    plan: Plan
    batches: tuple[Any, ...]
    lift: bool


@contextmanager
def comparable(*, lift: bool) -> Iterator[None]:
    """Without dropout, and with float32 casts lifted where that is asked for."""
    with without_dropout():
        if lift:
            with lifted_casts():
                yield
        else:
            yield


def train_on_rank(case: Case) -> Reference:
    """This rank's part of the training; collective. Tensors are there on rank 0 only."""
    plan = case.plan
    dp_rank = plan.mesh.coordinates(dist.get_rank())[0]
    losses: list[float] = []
    gradients: list[Tensors] = []
    with comparable(lift=case.lift):
        calls = [
            split_batch(*call_arguments(b), plan.dp, plan.batch_dims)[dp_rank] for b in case.batches
        ]
        args, kwargs = calls[0]
        model = auto_parallel(
            case.model, kwargs or args, plan=plan, cluster=NOMINAL_CPU, device="cpu"
        )
        optimizer = optimizer_for(model)
        for args, kwargs in calls:
            optimizer.zero_grad()
            loss = find_loss(model(*args, **kwargs))
            assert loss is not None, "auto_parallel refuses a model without a loss"
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
            gradients.append(model.full_gradients())
            optimizer.step()
        weights, buffers = split_state(case.model, model.full_state_dict())
    return Reference(tuple(losses), tuple(gradients), weights, buffers)


def train_in_one_process(case: Case, parts: int) -> Reference:
    """The plain training of the same batches, each in `parts` parts of which losses are averaged.

    Those of the first dp rank write the buffers. Raises `ConfigError` where the model gives no
    loss.
    """
    steps = [_parts(batch, parts, case.plan.batch_dims) for batch in case.batches]
    shares = [[1 / parts] * parts for _ in steps]
    with comparable(lift=True):
        return train_plain(
            copy.deepcopy(case.model), steps, shares, writing_parts=max(parts // case.plan.dp, 1)
        )


def _parts(batch: Any, parts: int, dims: BatchDims) -> Sequence[Call]:
    args, kwargs = call_arguments(batch)
    if any(tensor.is_meta for tensor in named_tensors(args, kwargs).values()):
        raise ConfigError("the batch is on the meta device and has no values; make it on the CPU")
    return [closed(call) for call in split_batch(args, kwargs, parts, dims)]
