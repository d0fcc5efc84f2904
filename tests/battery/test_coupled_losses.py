"""Losses that couple the samples of a batch train as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import merakc
from benchmarks.ranks import run_ranks
from merakc.machines.cluster import NOMINAL_CPU
from merakc.train.model import ParallelModel
from tests.coupled_models import ROUTED, TOWERS, Tensors

CASES = {"towers": TOWERS, "routed": ROUTED}
SAMPLES, MICRO_BATCHES, STEPS = 16, 2, 3


def parallel(name: str, options: dict[str, Any]) -> tuple[ParallelModel, Tensors]:
    """The model on these ranks, and the batch of this one."""
    case, dp = CASES[name], options.get("dp", 1)
    batch = case.batch(SAMPLES)
    given = {"cluster": NOMINAL_CPU, "micro_batches": MICRO_BATCHES} | options
    first = {k: v[: SAMPLES // dp] for k, v in batch.items()}
    model = merakc.auto_parallel(case.model(), first, **given)
    own = model.data_parallel_rank * (SAMPLES // dp)
    return model, {k: v[own : own + SAMPLES // dp] for k, v in batch.items()}


def steps(model: torch.nn.Module, batch: Tensors) -> list[float]:
    """The losses of some steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(STEPS):
        loss = model(**batch)["loss"]
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def trained(name: str, options: dict[str, Any]) -> tuple[list[float], Tensors]:
    """The losses on these ranks, and the weights after them."""
    model, batch = parallel(name, options)
    return steps(model, batch), model.full_state_dict()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("towers", {"tp": 2, "dp": 2, "state_shards": (1, 1, 2)}),
        ("routed", {"dp": 2, "pp": 2, "state_shards": (2, 2, 2), "recompute": "full"}),
        ("towers", {"pp": 2, "schedule": "auto"}),
    ],
    ids=str,
)
def test_training_equals_one_process(name: str, options: dict[str, Any]) -> None:
    ranks = options.get("dp", 1) * options.get("tp", 1) * options.get("pp", 1)
    model = CASES[name].model()
    losses = steps(model, CASES[name].batch(SAMPLES))
    found = run_ranks(ranks, trained, name, options)
    for own, _ in found:
        assert own == pytest.approx(losses, rel=1e-10)
    _, weights = found[0]
    torch.testing.assert_close(weights, dict(model.state_dict()), rtol=1e-8, atol=1e-10)


def head_seconds() -> tuple[float, float]:
    """Of the head, as it was measured before the first step, and as it is simulated."""
    model, batch = parallel("towers", {"dp": 2, "cluster": None})
    assert model.plan_file.measured is not None
    assert model.plan.head is not None
    model(**batch)["loss"].backward()
    dist.barrier()
    events = [e for e in model.last_events if e.label == "0head"]
    simulated = [e for e in model.simulation.events if e.label == "0head"]
    assert len(events) == 1
    assert len(simulated) == 2
    seconds = model.plan_file.measured.seconds[0]["head"]
    return seconds, simulated[0].end_s - simulated[0].start_s


def test_the_head_is_measured_with_the_other_computes() -> None:
    for seconds, simulated_s in run_ranks(2, head_seconds):
        assert seconds > 0
        assert simulated_s == pytest.approx(seconds, rel=0.5)
