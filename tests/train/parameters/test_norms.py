"""The norm of all gradients counts every element once, however the state is sharded."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import merakc
from benchmarks.ranks import run_ranks
from merakc.machines.cluster import NOMINAL_CPU
from merakc.runtime.part import plain
from merakc.train.parameters.norms import total_norm

KINDS = (1.0, 2.0, float("inf"))


class Tied(nn.Module):
    """A parameter of both stages, and more of each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))
        self.c.weight = self.a.weight
        self.double()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """The mean is over the samples."""
        return {"loss": self.c(torch.tanh(self.b(torch.tanh(self.a(x))))).square().mean()}


def batch(part: int, parts: int) -> torch.Tensor:
    return torch.linspace(-1, 2, 48, dtype=torch.float64).view(8, 6).chunk(parts)[part]


def norms(shards: object, **degrees: int) -> list[float]:
    dp = degrees["dp"]
    model = merakc.auto_parallel(
        Tied(), batch(0, dp), micro_batches=2, cluster=NOMINAL_CPU, state_shards=shards, **degrees
    )
    model(batch(model.data_parallel_rank, dp))["loss"].backward()
    own = {n: plain(t.grad) for n, t in model._steps.state.items() if t.grad is not None}
    return [float(total_norm(model._owners, own, kind)) for kind in KINDS]


@pytest.mark.parametrize(
    ("shards", "degrees"),
    [
        (["zero-1", (2, 2, 4)], {"dp": 4, "pp": 2}),
        ("zero-3", {"dp": 2, "tp": 2}),
    ],
)
def test_the_norm_is_that_of_one_process(shards: object, degrees: dict[str, int]) -> None:
    model = Tied()
    model(batch(0, 1))["loss"].backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    expected = [
        float(torch.linalg.vector_norm(torch.cat([g.reshape(-1) for g in gradients]), kind))
        for kind in KINDS
    ]
    for found in run_ranks(2 * degrees["dp"], partial(norms, shards, **degrees)):
        assert found == pytest.approx(expected, rel=1e-12)
