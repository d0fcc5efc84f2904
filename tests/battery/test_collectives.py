"""The collectives that a rank really starts are those of its Program, in its order."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

import merakc
from benchmarks.models import MODELS
from benchmarks.ranks import run_ranks
from benchmarks.reference import step_batch
from merakc.equality.compare import optimizer_for
from merakc.ir.program import CollectiveKind
from merakc.lowering import state_shards
from merakc.machines.cluster import NOMINAL_CPU
from merakc.passes.programs.collectives import rank_buckets
from merakc.runtime.sharded_state import ShardedState
from tests.small_buckets import small_buckets

BATCH_SIZE = 8
REFRESH, GATHER, SCATTER, REDUCE = (
    CollectiveKind.REFRESH, CollectiveKind.GATHER, CollectiveKind.SCATTER, CollectiveKind.REDUCE,
)  # fmt: skip
Started = list[tuple[str, str]]


def listen(sharded: ShardedState) -> Started:
    """What a rank starts from now on."""
    found: Started = []
    for name, bucket in sharded.named.items():

        def reduce(last: bool, own: Any = bucket, name: str = name) -> Iterator[Any]:
            if last or own.groups.shards.gradients > 1:
                found.append((REDUCE if last else SCATTER, name))
            return type(own).reduce(own, last=last)

        def gather(whole: torch.Tensor, own: Any = bucket, name: str = name) -> Iterator[Any]:
            found.append((GATHER, name))
            return type(own).gather(own, whole)

        def refresh(own: Any = bucket, name: str = name) -> Iterator[Any]:
            if own.groups.refresh is not None and own.is_trained:
                found.append((REFRESH, name))
            return type(own).refresh(own)

        bucket.reduce, bucket.gather, bucket.refresh = reduce, gather, refresh  # type: ignore
    return found


def started(options: dict[str, Any]) -> tuple[list[Started], list[Started], bool]:
    """What two steps and a forward alone started, what their Programs say, and whether the planner
    knew the buckets.
    """
    case = MODELS["gpt2"]
    with (
        small_buckets(),
        patch.object(state_shards, "bucket_scales", lambda _: (1, 2)),
    ):
        batch = step_batch(case, BATCH_SIZE, torch.float32, 0)
        model = merakc.auto_parallel(case.model(), batch, cluster=NOMINAL_CPU, **options)
        steps = model._own("_steps")
        planned = rank_buckets(model.plan, steps.planned.stages.local)[steps.groups.coordinates[1]]
    assert len(planned) > 2
    log = listen(steps.sharded)
    optimizer = optimizer_for(model)
    found = []
    for _ in range(2):
        model(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(list(log))
        log.clear()
    with torch.no_grad():
        model(**batch)
    train, forward = steps.compiled.values()
    said = [_said(train), _said(train), _said(forward)]
    return [*found, log], said, planned == steps.sharded.specs


def _said(step: Any) -> Started:
    return [
        (c.kind, c.bucket)
        for action in step.executor.program.actions
        for c in action.collectives
        if c.kind is not CollectiveKind.WAIT
    ]


CASES: list[dict[str, Any]] = [
    {"dp": 2, "state_shards": (1, 1, 1)},
    {"dp": 2, "state_shards": (1, 1, 2), "micro_batches": 2},
    {"dp": 2, "pp": 2, "state_shards": (2, 2, 2), "micro_batches": 2, "schedule": "zb-v",
     "recompute": "full", "precision": "bf16-mixed"},
    {"dp": 4, "state_shards": (2, 2, 4), "micro_batches": 2, "recompute": "full"},
]  # fmt: skip


@pytest.mark.parametrize("options", CASES, ids=str)
def test_what_runs_is_what_the_program_says(options: dict[str, Any]) -> None:
    world = options["dp"] * options.get("pp", 1)
    for found, said, as_planned in run_ranks(world, partial(started, options)):
        assert found == said
        assert as_planned
        assert said[0]
        assert bool(said[2]) == (options["state_shards"][2] > 1)
