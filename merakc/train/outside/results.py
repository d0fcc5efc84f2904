"""The results of a step, brought together from the ranks and micro-batches that have them."""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.distributed as dist

from merakc.ir.batches import Rows, ShareKind
from merakc.runtime.executor import StepResult
from merakc.train.batch_layout import dealt_over
from merakc.train.compiled_step import CompiledStep
from merakc.train.data.whole import joined_results
from merakc.train.steps import Steps

Tensors = dict[str, torch.Tensor]


def share_of(step: CompiledStep, name: str) -> tuple[ShareKind, Rows | None]:
    """How the results of the micro-batches make that of the batch."""
    return step.lowered.loss.results.get(name, (ShareKind.CONSTANT, None))


@torch.no_grad()
def share_results(
    steps: Steps,
    step: CompiledStep,
    result: StepResult,
    names: Collection[str] | None = None,
) -> Tensors:
    """The results of all samples of this dp replica, or of the whole job's where calls take its
    batch, and of what is of the whole batch, on every rank: those of `names`, or all. Collective.
    """
    groups, device = steps.groups, steps.device
    dp, own, tp = groups.coordinates
    group, replicas = groups.axis("pp"), dealt_over(step.layout, groups)
    found: Tensors = {}
    for name, (owner, spec) in step.result_specs.items():
        if names is not None and name not in names:
            continue
        kind, rows = share_of(step, name)
        whole = name in step.head_results
        parts = [result.whole[name]] if whole and owner == own else []
        if not whole and owner == own:
            parts = [r[name] for r in result.results]
        count = 1 if whole else step.layout.micro_batches
        if group is not None:
            source = groups.mesh.rank(dp, owner, tp)
            for k in range(count):
                if owner != own:
                    parts.append(torch.empty(spec.shape, dtype=spec.dtype, device=device))
                parts[k] = parts[k].contiguous()
                dist.broadcast(parts[k], source, group=group)
        if kind is ShareKind.ROWS and rows is not None:
            found[name] = rows.join(parts)
        elif kind is ShareKind.SUM:
            found[name] = torch.stack(parts).sum(0).to(spec.dtype)
            if replicas is not None:
                dist.all_reduce(found[name], group=replicas)
        else:
            found[name] = parts[0]
    return joined_results(steps, step, found) if steps.whole else found
