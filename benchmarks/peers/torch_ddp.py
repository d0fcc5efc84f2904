"""`DistributedDataParallel`; for ZeRO-1 with `ZeroRedundancyOptimizer`, as in torch's tutorials."""

from __future__ import annotations

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.training import (
    ADAM_EPS,
    LEARNING_RATE,
    Contestant,
    Training,
    adamw,
    plain_step,
)


def build(training: Training, form: str, rank: int) -> Contestant:
    """The model on this rank, for "zero-0" or "zero-1"."""
    model = DistributedDataParallel(training.model())
    optimizer: torch.optim.Optimizer = adamw(model.parameters())
    if form == "zero-1":
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, lr=LEARNING_RATE, eps=ADAM_EPS
        )
    return Contestant(plain_step(model, optimizer), lambda: dict(model.module.named_parameters()))
