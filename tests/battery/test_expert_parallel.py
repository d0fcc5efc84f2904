"""Ranks that share experts train as one process does."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest

from benchmarks.layouts import Task, train_layout, worst_difference
from benchmarks.models import MODELS
from benchmarks.ranks import run_ranks
from benchmarks.reference import Reference, train_reference
from merakc.ir.program import Mesh
from merakc.machines.cluster import NOMINAL_CPU

STEPS, BATCH_SIZE, MICRO_BATCHES = 2, 8, 4
CASES: list[tuple[str, Mesh, dict[str, Any]]] = [
    ("mixtral", Mesh(tp=4), {}),
    ("mixtral", Mesh(tp=2, pp=2), {"recompute": "full"}),
    ("mixtral", Mesh(dp=2, tp=2), {"offload": "activations", "recompute": "none"}),
    ("mixtral", Mesh(tp=2), {"recompute": "full"}),
    ("mixtral", Mesh(tp=2), {"recompute": "selective", "overlap": 2}),
]


@cache
def _reference(model: str) -> Reference:
    return train_reference(
        MODELS[model], batch_size=BATCH_SIZE, micro_batches=MICRO_BATCHES, steps=STEPS,
        lift_casts=True,
    )  # fmt: skip


@pytest.mark.parametrize(("model", "mesh", "options"), CASES, ids=str)
def test_training_equals_one_process(model: str, mesh: Mesh, options: dict[str, Any]) -> None:
    task = Task(
        MODELS[model], mesh, BATCH_SIZE, MICRO_BATCHES, STEPS, lift_casts=True, axis="ep",
        cluster=NOMINAL_CPU, options=options,
    )  # fmt: skip
    found = run_ranks(mesh.world_size, partial(train_layout, task))
    losses = [f.losses for f in found]
    assert worst_difference(found[0], losses, _reference(model), 1e-10).error < 1e-10
