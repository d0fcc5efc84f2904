"""Batches that every rank is given whole, of which each dp rank takes the samples that are its own.

As a program gives them that knows of one process: its sizes, orders and sums are those of the job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from merakc.batches.split import batch_size_of, named_tensors, sample_rows, with_samples
from merakc.ir.batches import ShareKind
from merakc.ir.layout import block_bounds
from merakc.train.compiled_step import CompiledStep
from merakc.train.steps import Steps

Tensors = dict[str, torch.Tensor]


def own_part(
    steps: Steps, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """This dp rank's samples of a batch, or all, where some ranks would have none; the step
    compares that all ranks were given the same.
    """
    dims, dp = steps.planned.plan.batch_dims, steps.planned.plan.dp
    steps.whole = {f"of the whole batch, {n}": t for n, t in named_tensors(args, kwargs).items()}
    samples, rank = batch_size_of(args, kwargs, dims), steps.groups.coordinates[0]
    steps.copied = 0 < samples < dp
    if dp == 1 or steps.copied:
        return tuple(args), dict(kwargs)
    first, last = block_bounds(samples, dp, rank)
    sampled = sample_rows(args, kwargs, dims)
    return with_samples(args, kwargs, sampled, lambda rows, t: rows.take(t, first, last - first))


def joined_results(steps: Steps, step: CompiledStep, found: Tensors) -> Tensors:
    """The results of all dp ranks' samples, from those of this rank's. Collective over dp."""
    group, mesh = steps.groups.axis("dp"), steps.groups.mesh
    own, pipeline_rank, tp = steps.groups.coordinates
    if group is None or step.layout.copies > 1:
        return found
    joined = dict(found)
    for name in found:
        kind, rows = step.lowered.loss.results.get(name, (ShareKind.CONSTANT, None))
        if kind is not ShareKind.ROWS or rows is None or name in step.head_results:
            continue
        parts = []
        for k, samples in enumerate(step.layout.sizes):
            shape = rows.sized(found[name].shape, samples)
            parts.append(found[name].contiguous() if k == own else found[name].new_empty(shape))
            dist.broadcast(parts[k], mesh.rank(k, pipeline_rank, tp), group=group)
        joined[name] = rows.join(parts)
    return joined
