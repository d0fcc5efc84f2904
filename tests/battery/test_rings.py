"""Ranks that pass keys and values around train as one process does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest

from benchmarks.layouts import Task, train_layout, worst_difference
from benchmarks.models import MODELS
from benchmarks.ranks import run_ranks
from benchmarks.reference import train_reference
from benchmarks.zoo_models import ZOO
from merakc.equality.compare import Reference
from merakc.ir.program import Mesh
from merakc.kernels import collectives
from merakc.machines.cluster import NOMINAL_CPU
from merakc.passes.sharding.sequences import rings

STEPS, BATCH_SIZE, MICRO_BATCHES = 2, 4, 2
# Grouped heads; dropout elsewhere in the layer, where positions are learned; biases; a window.
CASES: list[tuple[str, Mesh, dict[str, Any]]] = [
    ("llama", Mesh(cp=2), {"recompute": "full"}),
    ("llama", Mesh(cp=4), {"overlap": 2}),
    ("llama", Mesh(cp=2, tp=2), {}),
    ("llama", Mesh(cp=2, pp=2), {}),
    ("gpt2", Mesh(cp=2, pp=2), {}),
    ("gpt2", Mesh(cp=4), {}),
    ("qwen2", Mesh(cp=2, tp=2), {"recompute": "selective"}),
    ("qwen2", Mesh(cp=4), {}),
    ("gemma3", Mesh(cp=2), {}),
    ("gemma3", Mesh(cp=4), {}),
    ("gemma3", Mesh(cp=2, tp=2), {}),
]


@cache
def _reference(model: str) -> Reference:
    return train_reference(
        {**ZOO, **MODELS}[model], batch_size=BATCH_SIZE, micro_batches=MICRO_BATCHES, steps=STEPS,
        lift_casts=True,
    )  # fmt: skip


def _train(task: Task) -> tuple[Reference, Counter[str]]:
    """The training, and how often ranks sent what."""
    rings.RING_PRICE = 1e-9
    sent = Counter[str]()

    def noted(op: str, axis: str, size_bytes: int, issue: Callable[[], Any]) -> Any:
        sent[op] += 1
        return issue()

    with collectives.watched(noted):
        return train_layout(task), sent


@pytest.mark.parametrize(("model", "mesh", "options"), CASES, ids=str)
def test_training_equals_one_process(model: str, mesh: Mesh, options: dict[str, Any]) -> None:
    task = Task(
        {**ZOO, **MODELS}[model], mesh, BATCH_SIZE, MICRO_BATCHES, STEPS, lift_casts=True,
        schedule="zb-h1" if mesh.pp > 1 else "1f1b", cluster=NOMINAL_CPU, options=options,
    )  # fmt: skip
    found = run_ranks(mesh.world_size, partial(_train, task))
    losses = [own.losses for own, _ in found]
    assert worst_difference(found[0][0], losses, _reference(model), 1e-10).error < 1e-10
    for _, sent in found:
        assert sent["all_to_all"] > 0
        assert not sent["all_gather"]
