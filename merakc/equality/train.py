"""One training on local ranks under a plan, and the same in one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from merakc.api import auto_parallel
from merakc.batches.split import call_arguments, named_tensors, split_batch
from merakc.equality.batch_norms import norms_by_parts
from merakc.equality.casts import lifted_casts, without_dropout
from merakc.equality.compare import Reference, Tensors, optimizer_for, split_state
from merakc.equality.plain import Call, train_plain
from merakc.errors import ConfigError
from merakc.frontend.values.results import find_loss
from merakc.ir.batches import BatchDims, Rows
from merakc.ir.plan import Plan
from merakc.machines.cluster import NOMINAL_CPU


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


def train_in_one_process(
    case: Case, norms: Mapping[str, Rows] | None = None, parts: int = 1
) -> Reference:
    """The plain training of the same batches; it trains the case's own model, as a copy may have
    other hooks, so that it is run on a rank of its own.

    `norms` are the batch norms, with where the samples stand in what they read, that normalise
    each micro-batch of the plan by itself. Losses of `parts` parts of each batch are averaged.
    Buffers are written by what the plan's first dp rank has. Raises `ConfigError` where the model
    gives no loss.
    """
    steps = [_parts(batch, parts, case.plan.batch_dims) for batch in case.batches]
    shares = [[1 / parts] * parts for _ in steps]
    own = case.plan.micro_batches
    with comparable(lift=True), norms_by_parts(case.model, norms or {}, case.plan.dp * own, own):
        return train_plain(case.model, steps, shares, writing_parts=max(parts // case.plan.dp, 1))


def _parts(batch: Any, parts: int, dims: BatchDims) -> Sequence[Call]:
    args, kwargs = call_arguments(batch)
    if any(tensor.is_meta for tensor in named_tensors(args, kwargs).values()):
        raise ConfigError("the batch is on the meta device and has no values; make it on the CPU")
    return split_batch(args, kwargs, parts, dims)
