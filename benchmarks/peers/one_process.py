"""One process, eager: the loop that every other contestant's lines are compared with."""

from __future__ import annotations

import torch

from benchmarks.peers.training import Contestant, Tensors, Training, adamw, split


def build(training: Training, form: str, rank: int) -> Contestant:
    """The model, for "1 thread", "2 threads", ..."""
    torch.set_num_threads(int(form.split()[0]))
    model = training.model()
    optimizer = adamw(model.parameters())

    def step(batch: Tensors) -> None:
        optimizer.zero_grad()
        for part in split(batch, training.micro_batches):
            loss = model(**part).loss / training.micro_batches
            loss.backward()
        optimizer.step()

    return Contestant(step, lambda: dict(model.named_parameters()))
