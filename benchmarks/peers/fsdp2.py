"""FSDP2: `fully_shard` on every block and on the model, as in torch's tutorial."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.peers.training import Contestant, Training, adamw, plain_step


def build(training: Training, form: str, rank: int) -> Contestant:
    """The model on this rank, for "zero-2" (blocks stay whole after the forward) or "zero-3"."""
    model = training.model()
    dropped = form == "zero-3"
    for block in model.model.layers:  # type: ignore[union-attr]
        fully_shard(block, reshard_after_forward=dropped)
    fully_shard(model, reshard_after_forward=dropped)

    def weights() -> dict[str, torch.Tensor]:
        whole = {}
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            whole[name] = parameter.full_tensor()
        return whole

    return Contestant(plain_step(model, adamw(model.parameters())), weights)
