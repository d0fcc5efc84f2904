"""The norm of all gradients, over all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from merakc.runtime.shards import ShardGroups
from merakc.train.steps import Steps


def total_norm(steps: Steps, norm_type: float) -> torch.Tensor:
    """The norm of the gradients of the whole model, float64. Every rank must call it.

    Every element counts once, however many ranks hold it.
    """
    _, pipeline_rank, tp = steps.groups.coordinates
    bucket_of = steps.sharded.bucket_of if steps.sharded else {}
    gradients: dict[ShardGroups | None, list[torch.Tensor]] = {
        bucket.groups: [] for bucket in bucket_of.values()
    }
    for name, place in steps.placements.items():
        grad = steps.state[name].grad if name in steps.state else None
        first = place.owner == pipeline_rank and (tp == 0 or place.layout.is_split)
        if grad is not None and first:
            groups = bucket_of[name].groups if name in bucket_of else None
            gradients.setdefault(groups, []).append(grad)
    infinite = norm_type == float("inf")
    total = torch.zeros((), dtype=torch.float64, device=steps.device)

    def add(one: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        if group is not None:
            dist.all_reduce(one, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=group)
        return one

    for shards, own in gradients.items():
        norms = [torch.linalg.vector_norm(g, norm_type).double() for g in own if g.numel()]
        part = torch.zeros_like(total)
        if norms:
            stacked = torch.stack(norms)
            part = stacked.max() if infinite else stacked.pow(norm_type).sum()
        part = add(part, shards.block if shards else None)
        total = torch.maximum(total, part) if infinite else total + part
    total = add(total, steps.groups.axis("model"))
    return total if infinite else total.pow(1 / norm_type)
