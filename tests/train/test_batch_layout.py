"""Ranks of uneven batches, whose sizes may say different things of where the samples stand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import merakc
from benchmarks.ranks import run_ranks
from merakc.errors import MismatchError
from merakc.machines.cluster import NOMINAL_CPU
from tests.battery.small_models import build

STEPS, SIZES = 5, (5, 3)


class Frames(nn.Module):
    """Reads frames, time first, beside targets, in a loss to which no dim means anything."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, frames: Tensor, target: Tensor) -> Tensor:
        """`frames` [steps, n, 2], `target` [n, 2]."""
        return self.layer(frames).pow(2).mean() + self.layer(target).pow(2).mean()


def refused(batch_dims: dict[str, int] | None) -> str:
    """The error of a step on 5 and 3 samples of 5 steps, if it is one."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    batch = {"frames": torch.ones(STEPS, SIZES[rank], 2), "target": torch.ones(SIZES[rank], 2)}
    model = merakc.auto_parallel(
        Frames(), batch, dp=2, micro_batches=1, cluster=NOMINAL_CPU, batch_dims=batch_dims
    )
    try:
        model(**batch).backward()
    except MismatchError as error:
        return str(error)
    return ""


def both() -> tuple[str, str]:
    """Where nothing is said of the batch, and where it is."""
    return refused(None), refused({"frames": 1})


def test_all_ranks_read_their_batches_alike() -> None:
    for unsaid, said in run_ranks(2, both):
        assert "is [5, 2] with dim 0 on rank 0, [3, 2] with dim None on rank 1); say it" in unsaid
        assert not said


def evaluated(options: dict[str, Any] | None) -> list[float]:
    """Losses of batches of several sizes, trained and then evaluated."""
    sizes = (8, 5, 1, 6)
    made = torch.Generator().manual_seed(0)
    given = [torch.randn(n, 4, generator=made).double() for n in sizes]
    model: Any = build(Squares)
    if options is not None:
        model = merakc.auto_parallel(model, given[0], cluster=NOMINAL_CPU, **options)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for batch in given:
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        return losses + [model.eval()(batch).item() for batch in given]


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        """A mean square."""
        return self.layers(x).square().mean()


def test_batches_that_do_not_divide_are_in_fewer_parts() -> None:
    """The number that was asked for is that of the batch that the plan was made for."""
    wanted = evaluated(None)
    for found in run_ranks(2, lambda: evaluated({"dp": 1, "pp": 2, "micro_batches": 4})):
        assert found == pytest.approx(wanted, rel=1e-10)
