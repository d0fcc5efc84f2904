"""The plain training that every layout is compared with: one process, eager, no merakc.

It takes the same micro-batches in the same order, so that what normalises over the micro-batch
(BatchNorm) normalises over the same samples, and weighs their losses so that the sum is the mean
over the labels of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from benchmarks.models import Batch, ModelCase

Tensors = dict[str, torch.Tensor]

# AdamW divides by the gradient's size, and so turns the rounding of a gradient that is zero in
# theory (every key bias) into a step as long as any other. With eps as large as the learning rate
# a step is never longer than the gradient: rounding stays rounding, and can be compared.
LEARNING_RATE = 1e-2
ADAM_EPS = 1e-2


@dataclass(frozen=True, slots=True)
class Reference:
    """What a training gave: losses and gradients of each step, weights and buffers at the end.

    `gradients` are by parameter name, a tied parameter once; `weights` and `buffers` are the two
    kinds of the state dict, a tied parameter under every name.
    """

    losses: tuple[float, ...]
    gradients: tuple[Tensors, ...]
    weights: Tensors
    buffers: Tensors


def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of both sides."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=ADAM_EPS)


def step_batch(case: ModelCase, batch_size: int, dtype: torch.dtype, step: int) -> Batch:
    """The batch of a step, the same for everybody."""
    return case.batch(batch_size, dtype, seed=1000 + step)


def train_reference(
    case: ModelCase,
    *,
    batch_size: int,
    micro_batches: int,
    steps: int,
    dtype: torch.dtype = torch.float64,
    lift_casts: bool = False,
    dp: int = 1,
    clip_norm: float | None = None,
) -> Reference:
    """Trains `case` for `steps` steps of `micro_batches` micro-batches of the whole batch.

    With `dp` > 1 only the micro-batches of dp rank 0, the first of each batch, write the buffers:
    data parallelism keeps rank 0's running statistics, as `DistributedDataParallel` does. Gradients
    are those after clipping.
    """
    model = case.model(dtype)
    optimizer = optimizer_for(model)
    losses, gradients = [], []
    with lifted_casts() if lift_casts else nullcontext():
        for step in range(steps):
            parts = split_batch(step_batch(case, batch_size, dtype, step), micro_batches)
            optimizer.zero_grad()
            losses.append(_accumulate(model, case.valid_labels, parts, micro_batches // dp))
            if clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            gradients.append(
                {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            )
            optimizer.step()
    weights, buffers = split_state(model, model.state_dict())
    return Reference(tuple(losses), tuple(gradients), weights, buffers)


def split_batch(batch: Batch, parts: int) -> list[Batch]:
    """The batch in `parts` equal parts along dim 0, in order."""
    chunks = {name: value.chunk(parts) for name, value in batch.items()}
    return [{name: value[k] for name, value in chunks.items()} for k in range(parts)]


def split_state(model: nn.Module, state: Tensors) -> tuple[Tensors, Tensors]:
    """A state dict's parameters and buffers apart."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return (
        {name: value for name, value in state.items() if name in parameters},
        {name: value for name, value in state.items() if name not in parameters},
    )


def _accumulate(
    model: nn.Module,
    valid_labels: Callable[[Batch], int],
    parts: Sequence[Batch],
    writing_parts: int,
) -> float:
    """Adds up the gradients of the parts; gives the mean loss over all their valid labels."""
    counts = [valid_labels(part) for part in parts]
    total = 0.0
    for k, (part, count) in enumerate(zip(parts, counts, strict=True)):
        kept = {} if k < writing_parts else {n: b.clone() for n, b in model.named_buffers()}
        loss = model(**part)["loss"] * (count / sum(counts))
        loss.backward()
        total += loss.item()
        with torch.no_grad():
            for name, value in kept.items():
                model.get_buffer(name).copy_(value)
    return total


class _LiftedCasts(TorchFunctionMode):
    """Puts float64 wherever a torch call is asked for float32."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        lifted = {name: _lift(value) for name, value in (kwargs or {}).items()}
        return func(*map(_lift, args), **lifted)


class _Grouped(TorchFunctionMode):
    """Gives torch the product of rows in groups that it lacks in float64."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch._grouped_mm and args[0].dtype == torch.float64:
            return _grouped_mm(*args[:2], (kwargs or {})["offs"])
        return func(*args, **(kwargs or {}))


def _grouped_mm(x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """`F.grouped_mm` of rows in groups, which torch does not compute in float64."""
    sizes = offs.diff(prepend=offs.new_zeros(1)).tolist()
    return torch.cat([rows @ own for rows, own in zip(x.split(sizes), w, strict=True)])


def _lift(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def grouped_products() -> Iterator[None]:
    """Lets experts whose rows are multiplied in groups run in float64."""
    with _Grouped():
        yield


@contextmanager
def lifted_casts() -> Iterator[None]:
    """Turns the float32 casts in a model's own code (norms, softmax, losses) into float64.

    Without it a float64 model of transformers computes parts in float32, and its results can be
    compared to seven digits only.
    """
    with grouped_products(), _LiftedCasts():
        yield
