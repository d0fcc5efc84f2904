"""The plain training that a plan is compared with: one process, eager, no plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from merakc.equality.compare import Reference, optimizer_for, split_state
from merakc.errors import ConfigError
from merakc.frontend.values.results import find_loss

Call = tuple[Sequence[Any], Mapping[str, Any]]  # the arguments of one micro-batch


def train_plain(
    model: nn.Module,
    steps: Sequence[Sequence[Call]],
    weights: Sequence[Sequence[float]],
    *,
    writing_parts: int,
    clip_norm: float | None = None,
) -> Reference:
    """Trains a model in this process, step by step over its micro-batches.

    The loss of a step is the sum of those of its micro-batches times their `weights`, and its
    gradients are that sum's. Only the first `writing_parts` micro-batches of a step write the
    buffers: data parallelism keeps rank 0's running statistics, as `DistributedDataParallel` does.
    Gradients are those after clipping. Raises `ConfigError` where the model gives no loss.
    """
    optimizer = optimizer_for(model)
    losses, gradients = [], []
    for calls, shares in zip(steps, weights, strict=True):
        optimizer.zero_grad()
        losses.append(_accumulate(model, calls, shares, writing_parts))
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        gradients.append(
            {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        )
        optimizer.step()
    parameters, buffers = split_state(model, model.state_dict())
    return Reference(tuple(losses), tuple(gradients), parameters, buffers)


def loss_of(model: nn.Module, call: Call) -> torch.Tensor:
    """The loss that a model gives for a micro-batch. Raises `ConfigError` where it gives none."""
    loss = find_loss(model(*call[0], **call[1]))
    if loss is None:
        raise ConfigError(
            f"the forward of {type(model).__name__} returns no loss for this batch; give it the "
            "labels, or wrap the model in a module whose forward returns the loss"
        )
    return loss


def _accumulate(
    model: nn.Module, calls: Sequence[Call], shares: Sequence[float], writing_parts: int
) -> float:
    """Adds up the gradients of the micro-batches; gives the sum of their weighted losses."""
    total = 0.0
    for k, (call, share) in enumerate(zip(calls, shares, strict=True)):
        kept = {} if k < writing_parts else {n: b.clone() for n, b in model.named_buffers()}
        loss = loss_of(model, call) * share
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
        with torch.no_grad():
            for name, value in kept.items():
                model.get_buffer(name).copy_(value)
    return total
