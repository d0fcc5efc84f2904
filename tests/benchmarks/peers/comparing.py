"""Trains a contestant on this rank, and one process beside it."""

from __future__ import annotations

import importlib
import os
import warnings
from dataclasses import replace

import torch
import torch.distributed as dist

from benchmarks.peers.training import Training, first_gradients, largest_error, train_alone

STEPS = 2
TINY = Training(ranks=2, samples=2, sequence=8, hidden=16, layers=2, vocabulary=32)


def error_of(peer: str, form: str, **sizes: int) -> float:
    """The largest error of the first gradients and of the weights after some steps, on rank 0."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    training = replace(TINY, **sizes)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # Accelerate looks for them
    errors = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peers call what torch deprecates
        module = importlib.import_module(f"benchmarks.peers.{peer}")
        contestant = module.build(training, form, rank)
        own = contestant.dp_rank if contestant.dp_rank is not None else training.dp_rank(rank)
        for step in range(STEPS):
            contestant.step(training.batch(step, own))
            found = {name: p.detach().clone() for name, p in contestant.weights().items()}
            if rank:
                continue
            before, after = train_alone(training, step + 1)
            found = {name: found[name] for name in after}
            errors.append(largest_error(found, before, after))
            if step == 0:
                wanted = first_gradients(before, after)
                zeros = {name: torch.zeros_like(p) for name, p in wanted.items()}
                errors.append(largest_error(first_gradients(before, found), zeros, wanted))
    return max(errors, default=0.0)
