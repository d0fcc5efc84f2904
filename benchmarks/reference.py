"""The plain training that every layout is compared with: one process, eager, no merakc.

It takes the whole batch at once. A model with BatchNorm, which by convention normalises over each
micro-batch, takes the same micro-batches in the same order, and their losses are weighed so that
the sum is the mean over the labels of the whole batch.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch

from benchmarks.models import Batch, ModelCase
from merakc.equality.casts import grouped_products, lifted_casts
from merakc.equality.compare import (
    ADAM_EPS,
    LEARNING_RATE,
    Reference,
    Tensors,
    optimizer_for,
    split_state,
)
from merakc.equality.plain import train_plain

__all__ = [
    "ADAM_EPS",
    "LEARNING_RATE",
    "Reference",
    "Tensors",
    "grouped_products",
    "lifted_casts",
    "optimizer_for",
    "split_batch",
    "split_state",
    "step_batch",
    "train_reference",
]


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
    """Trains `case` for `steps` steps, each of a whole batch, or of its `micro_batches` parts where
    the model keeps running statistics.

    With `dp` > 1 only the micro-batches of dp rank 0, the first of each batch, write the buffers.
    Gradients are those after clipping.
    """
    model = case.model(dtype)
    calls, weights = [], []
    for step in range(steps):
        batch = step_batch(case, batch_size, dtype, step)
        parts = split_batch(batch, micro_batches if case.running_statistics else 1)
        counts = [case.valid_labels(part) for part in parts]
        calls.append([((), part) for part in parts])
        weights.append([count / sum(counts) for count in counts])
    with lifted_casts() if lift_casts else nullcontext():
        return train_plain(
            model, calls, weights, writing_parts=micro_batches // dp, clip_norm=clip_norm
        )


def split_batch(batch: Batch, parts: int) -> list[Batch]:
    """The batch in `parts` equal parts along dim 0, in order."""
    chunks = {name: value.chunk(parts) for name, value in batch.items()}
    return [{name: value[k] for name, value in chunks.items()} for k in range(parts)]
