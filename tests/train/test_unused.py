"""Parameters that a batch does not use have no gradient, as in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import merakc
from benchmarks.ranks import run_ranks
from merakc.frontend.record import record
from merakc.machines.cluster import NOMINAL_CPU
from merakc.train.unused import doubtful
from tests.battery.small_models import WIDTH, Tensors, assert_close, build, warm_up
from tests.frontend.small import Small


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    warm_up()


class Gate(nn.Module):
    """One of two layers, by the sign of what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of the same shape."""
        found: torch.Tensor = self.first(x) if x.detach().sum() > 0 else self.other(x)
        return found


class Gated(nn.Module):
    """A gate behind a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.gate = Gate()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss."""
        return self.gate(self.layers(x)).square().mean()


def batches() -> list[torch.Tensor]:
    """A batch for either layer, whole, and one for each half."""
    x = torch.rand(4, WIDTH, dtype=torch.float64) + 1
    return [9 * x, -9 * x]


def one_process(batch: torch.Tensor) -> tuple[float, Tensors]:
    model = build(Gated)
    loss = model(batch)
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def train(given: list[torch.Tensor], options: dict[str, Any]) -> list[tuple[float, Tensors]]:
    model = merakc.auto_parallel(
        build(Gated), given[0].chunk(options.get("dp", 1))[0], cluster=NOMINAL_CPU, **options
    )
    found = []
    for x in given:
        model.zero_grad()
        loss = model(x.chunk(model.data_parallel_size)[model.data_parallel_rank])
        loss.backward()
        found.append((loss.item(), copy.deepcopy(model.full_gradients())))
    return found


@pytest.mark.filterwarnings("ignore:module 'gate' cannot be recorded")
@pytest.mark.parametrize(
    "options",
    [
        {"pp": 2, "micro_batches": 2},
        {"tp": 2, "micro_batches": 1},
        {"dp": 2, "micro_batches": 1, "state_shards": "zero-3"},
    ],
)
def test_what_a_batch_does_not_use_has_no_gradient(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    given = batches()
    for k, (loss, gradients) in enumerate(run_ranks(2, train, given, options)[0]):
        wanted_loss, wanted = one_process(given[k])
        assert loss == pytest.approx(wanted_loss, rel=1e-12)
        assert_close(gradients, wanted)
        names = {n for n in gradients if n.startswith("gate")}
        assert len(names) == 2


def test_only_what_runs_as_it_is_is_doubted() -> None:
    x = torch.ones(4, WIDTH, dtype=torch.float64)
    graph = record(build(Gated), (x,), {}).graph
    assert set(doubtful(graph)) == {f"gate.{n}" for n, _ in Gate().named_parameters()}
    shared = Gated()
    shared.layers[0] = shared.gate.first
    graph = record(shared.double(), (x,), {}).graph
    assert set(doubtful(graph)) == {"gate.other.weight", "gate.other.bias"}
    plain = record(Small(lambda s, x: s.layer(x).sum(), layer=shared.layers[1]), (x,), {})
    assert not doubtful(plain.graph)
