"""Communication under computation together with everything else: gradients of one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from benchmarks.ranks import run_ranks
from merakc.costs.work.flops import PIPELINED
from merakc.kernels.ops import STARTED
from merakc.machines.cluster import Cluster
from tests.battery.small_models import (
    Tensors,
    Words,
    assert_close,
    parallel,
    part,
    warm_up,
    words,
)

MICRO_BATCHES = 2  # of each dp rank
CASES: list[dict[str, Any]] = [
    {"tp": 2, "pp": 2, "schedule": "zb-h1", "recompute": "none", "overlap": 2},
    {"tp": 2, "recompute": "full", "overlap": 2},
    {"tp": 2, "recompute": "selective", "sequence_parallel": True, "overlap": 1},
    {"dp": 2, "tp": 2, "state_shards": "zero-3", "overlap": 2},
]


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    warm_up()


def train(options: dict[str, Any]) -> tuple[list[float], Tensors, int]:
    """Two batches, of which the second is of a size that does not divide into the parts."""
    model = parallel(lambda: Words(blocks=2, dropout=0.3), words(0), **options)
    losses = []
    for batch in (words(0), words(1, batch_size=4)):
        model.zero_grad()
        loss = model(**part(batch, model))["loss"]
        loss.backward()
        losses.append(loss.item())
    steps = model._own("_steps").compiled.values()
    graphs = [c.forward for step in steps for c in step.chunks.values()]
    started = sum(node.op in STARTED for graph in graphs for node in graph.nodes)
    return losses, model.full_gradients(), started


@cache
def alone(micro_batches: int) -> tuple[list[float], Tensors, int]:
    return train({"micro_batches": micro_batches})


@pytest.mark.parametrize("options", CASES, ids=str)
def test_training_equals_one_process(options: dict[str, Any]) -> None:
    dp = options.get("dp", 1)
    ranks = dp * options["tp"] * options.get("pp", 1)
    found = run_ranks(ranks, train, {"dp": 1, "pp": 1, "micro_batches": MICRO_BATCHES, **options})
    losses, gradients, _ = alone(MICRO_BATCHES * dp)
    for own, _, started in found:
        assert own == pytest.approx(losses, rel=1e-12)
        assert started > 0
    assert_close(found[0][1], gradients)


ONE_SAMPLE: list[dict[str, Any]] = [
    {"tp": 2, "recompute": "none", "overlap": 2},
    {"tp": 2, "sequence_parallel": True, "recompute": "full", "overlap": 3},
]


def train_rows(options: dict[str, Any]) -> tuple[list[float], Tensors, int]:
    """Micro-batches of one sample: a step, and another of shorter samples."""
    model = parallel(lambda: Words(blocks=2, dropout=0.3), words(0), **options)
    losses = []
    for batch in (words(0), words(1, length=4)):
        model.zero_grad()
        loss = model(**batch)["loss"]
        loss.backward()
        losses.append(loss.item())
    asked = {options["overlap"]} if options["tp"] > 1 else set()
    assert set(model.plan.row_chunks.values()) == asked
    steps = model._own("_steps").compiled.values()
    graphs = [c.forward for step in steps for c in step.chunks.values()]
    started = sum(node.op in STARTED for graph in graphs for node in graph.nodes)
    return losses, model.full_gradients(), started


@pytest.mark.parametrize("options", ONE_SAMPLE, ids=str)
def test_one_sample_in_chunks_of_rows_equals_one_process(options: dict[str, Any]) -> None:
    given = {"dp": 1, "pp": 1, "micro_batches": 8}
    losses, gradients, _ = train_rows({**given, "tp": 1, "overlap": 0})
    found = run_ranks(options["tp"] * options.get("pp", 1), train_rows, {**given, **options})
    for own, _, started in found:
        assert own == pytest.approx(losses, rel=1e-12)
        assert started > 0
    assert_close(found[0][1], gradients)


# Machines whose links take about as long as their products, and calls too long for chunks.
SYMMETRIC = Cluster("GPUs", 1e7, 1e10, 3e-6, 1 << 33, 0.0, 1e7, symmetric_memory=True)
FUSED: list[dict[str, Any]] = [
    {"tp": 2, "recompute": "full"},
    {"tp": 2, "pp": 2, "schedule": "zb-h1", "recompute": "none"},
]


def train_fused(options: dict[str, Any]) -> tuple[list[float], Tensors, int]:
    """A step, and another of sequences that do not divide over the ranks."""
    model = parallel(lambda: Words(blocks=2, dropout=0.3), words(0), **options)
    losses = []
    for batch in (words(0), words(1, length=5)):
        model.zero_grad()
        loss = model(**part(batch, model))["loss"]
        loss.backward()
        losses.append(loss.item())
    first, other = model._own("_steps").compiled.values()
    fused = []
    for step in (first, other):
        graphs = [g for c in step.chunks.values() for g in (c.forward, c.backward) if g]
        fused.append(sum(node.op in PIPELINED for graph in graphs for node in graph.nodes))
    assert fused[1] == 0
    assert bool(fused[0]) is bool(model.plan.fused_products)
    return losses, model.full_gradients(), fused[0]


@pytest.mark.parametrize("options", FUSED, ids=str)
def test_products_fused_with_collectives_equal_one_process(options: dict[str, Any]) -> None:
    dp = options.get("dp", 1)
    given = {"dp": 1, "pp": 1, "micro_batches": 8 // dp}
    losses, gradients, none = train_fused({**given, "tp": 1, "micro_batches": 8})
    assert none == 0
    options = {**given, "sequence_parallel": True, "cluster": SYMMETRIC, **options}
    found = run_ranks(dp * 2 * options["pp"], train_fused, options)
    for own, _, fused in found:
        assert own == pytest.approx(losses, rel=1e-12)
        assert fused > 0
    assert_close(found[0][1], gradients)
