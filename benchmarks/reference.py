"""The plain training that every layout is compared with: one process, eager, no merakc.

It takes the whole batch at once. Batch norms alone see each micro-batch by itself, as they do in
every layout by convention.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from benchmarks.models import Batch, ModelCase
from merakc.equality.batch_norms import norms_by_parts
from merakc.equality.casts import lifted_casts
from merakc.equality.compare import Reference
from merakc.equality.plain import train_plain
from merakc.ir.batches import Rows


def step_batch(case: ModelCase, batch_size: int, dtype: torch.dtype, step: int) -> Batch:
    """The batch of a step, the same for everybody."""
    return case.batch(batch_size, dtype, seed=1000 + step)


def train_reference(
    case: ModelCase,
    *,
    batch_size: int,
    micro_batches: int,
    steps: int,
    lift_casts: bool = False,
    dp: int = 1,
    clip_norm: float | None = None,
) -> Reference:
    """Trains `case` in float64 for `steps` steps of the whole batch.

    Batch norms normalise each of its `micro_batches` by itself. Running statistics are those of the
    first of `dp` ranks, whose micro-batches are the first of each batch. Gradients are those after
    clipping.
    """
    model = case.model(torch.float64)
    calls = [[((), step_batch(case, batch_size, torch.float64, step))] for step in range(steps)]
    norms = {n: Rows() for n, m in model.named_modules() if isinstance(m, _BatchNorm)}
    with (
        lifted_casts() if lift_casts else nullcontext(),
        norms_by_parts(model, norms, micro_batches, micro_batches // dp),
    ):
        return train_plain(model, calls, [[1.0]] * steps, writing_parts=1, clip_norm=clip_norm)


def split_batch(batch: Batch, parts: int) -> list[Batch]:
    """The batch in `parts` equal parts along dim 0, in order."""
    chunks = {name: value.chunk(parts) for name, value in batch.items()}
    return [{name: value[k] for name, value in chunks.items()} for k in range(parts)]
