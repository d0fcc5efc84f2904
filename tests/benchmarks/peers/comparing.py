"""Trains a contestant on this rank, and one process beside it."""

from __future__ import annotations

import importlib
import warnings

import torch.distributed as dist

from benchmarks.peers.training import Training, largest_error, train_alone

STEPS = 2


def error_of(peer: str, sharding: str) -> float:
    """The largest error of the weights after some steps, on rank 0."""
    rank = dist.get_rank()
    training = Training(ranks=2, samples=2, sequence=8, hidden=16, layers=2, vocabulary=32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peers call what torch deprecates
        contestant = importlib.import_module(f"benchmarks.peers.{peer}").build(
            training, sharding, rank
        )
        for step in range(STEPS):
            contestant.step(training.batch(step, rank))
        found = contestant.weights()
    if rank:
        return 0.0
    before, after = train_alone(training, STEPS)
    return largest_error({name: found[name] for name in after}, before, after)
