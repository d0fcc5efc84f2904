"""A small stand-in for the compiled model, so that the benchmarks are tested without compiler.

It is plain data parallelism over micro-batches, with the interface of `merakc.auto_parallel`'s
model, and can be told to be wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers.modeling_outputs import CausalLMOutput

from benchmarks.models import Batch
from benchmarks.reference import split_batch
from merakc.errors import ShardError


class StandIn(nn.Module):
    """Runs the schedule in forward; `loss.backward()` hands out the gradients."""

    def __init__(
        self,
        model: nn.Module,
        valid_labels: Callable[[Batch], int],
        micro_batches: int,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.inner = model
        self.valid_labels = valid_labels
        self.micro_batches = micro_batches
        self.scale = scale
        self.hooks: list[RemovableHandle] = []

    def forward(self, **batch: torch.Tensor) -> CausalLMOutput:
        for hook in self.hooks:  # `autograd.grad` below would call them too
            hook.remove()
        total = torch.tensor(float(self.valid_labels(batch)))
        dist.all_reduce(total)
        parameters = [p for p in self.inner.parameters() if p.requires_grad]
        loss = torch.zeros((), dtype=torch.float64)
        gradients = [torch.zeros_like(p) for p in parameters]
        for part in split_batch(batch, self.micro_batches):
            share = self.inner(**part)["loss"] * self.valid_labels(part) / total
            loss += share.detach()
            for kept, new in zip(gradients, torch.autograd.grad(share, parameters), strict=True):
                kept += new * self.scale
        for tensor in (loss, *gradients):
            dist.all_reduce(tensor)
        handle = sum((p * 0.0).sum() for p in parameters) + loss
        self.hooks = [
            parameter.register_hook(  # type: ignore[no-untyped-call]
                lambda _, gradient=gradient: gradient
            )
            for parameter, gradient in zip(parameters, gradients, strict=True)
        ]
        return CausalLMOutput(loss=handle)

    def full_gradients(self) -> dict[str, torch.Tensor]:
        if dist.get_rank():
            return {}
        found = ((n, p.grad) for n, p in self.inner.named_parameters())
        return {name: grad.clone() for name, grad in found if grad is not None}

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        return {} if dist.get_rank() else dict(self.inner.state_dict())


def stand_in(valid_labels: Callable[[Batch], int], scale: float = 1.0) -> Callable[..., StandIn]:
    """An `auto_parallel` that refuses tp, and whose gradients are off by `scale`."""

    def auto_parallel(
        model: nn.Module, batch: Batch, *, tp: int, micro_batches: int, **_: Any
    ) -> StandIn:
        if tp > 1:
            raise ShardError("the stand-in knows no tp")
        return StandIn(model, valid_labels, micro_batches, scale)

    return auto_parallel
