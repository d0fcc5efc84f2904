"""What functions with a cache remember of forwards, beside one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import merakc
from merakc.frontend.carried import CarriedError

F64 = torch.float64
NUMBERS = {"factor": 1.0}


@functools.lru_cache
def factor(_: int) -> float:
    return NUMBERS["factor"]


@functools.cache
def endless(_: int) -> float:
    return NUMBERS["factor"]


@functools.lru_cache
def table(width: int) -> Tensor:
    return torch.arange(width, dtype=F64) * NUMBERS["factor"]


@functools.lru_cache
def weighed(width: int, *, kind: str) -> tuple[Tensor, str]:
    return table.__wrapped__(width), kind


def named(width: int) -> Tensor:
    made, _ = weighed(width, kind="any")
    return made


named.cache_clear = weighed.cache_clear  # type: ignore[attr-defined]


@functools.lru_cache(typed=True)
def like(width: int) -> Tensor:
    return torch.arange(width, dtype=F64) * NUMBERS["factor"]


class Scaled(nn.Module):
    def __init__(self, scale: Callable[[int], Any]) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 6, dtype=F64), scale

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.scale(6)).square().mean()


def train(scale: Any, changes: str, *, parallel: bool) -> list[float]:
    """Losses; the number that is read `changes` later, or before the first step too; what is
    remembered after each step is given as well, or cleared.
    """
    NUMBERS["factor"] = 1.0
    scale.cache_clear()
    torch.manual_seed(0)
    model: Any = Scaled(scale)
    x = torch.randn(4, 6, dtype=F64, generator=torch.Generator().manual_seed(1))
    if parallel:
        model = merakc.auto_parallel(model, x, dp=1, tp=1, pp=1)
    NUMBERS["factor"] += "early" in changes
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), list[float]()
    for _ in range(3):
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        NUMBERS["factor"] += bool(changes)
        found += [loss.item(), float(torch.as_tensor(scale(6)).sum()) if "read" in changes else 0]
        if "written" in changes:
            scale(6).mul_(1.5)
        if "cleared" in changes:
            scale.cache_clear()
    return found


@pytest.mark.parametrize("changes", ["", "later", "early", "later, read", "early, read", "cleared"])
@pytest.mark.parametrize("scale", [factor, endless, table, named])
def test_values_are_those_of_one_process(scale: Any, changes: str) -> None:
    own, plain = (train(scale, changes, parallel=k) for k in (True, False))
    assert own == pytest.approx(plain, rel=1e-12)


@pytest.mark.parametrize(
    "changes", ["written", "written, read", "early, written", "cleared, written"]
)
def test_writes_to_what_is_remembered_count(changes: str) -> None:
    own, plain = (train(table, changes, parallel=k) for k in (True, False))
    assert own == pytest.approx(plain, rel=1e-12)


def test_tensors_that_cannot_be_made_have_to_stay_the_same() -> None:
    own, plain = (train(like, "", parallel=k) for k in (True, False))
    assert own == pytest.approx(plain, rel=1e-12)
    with pytest.raises(CarriedError, match=r"test_remembered.py:\d+: 'like' .*'factor'.* changed"):
        train(like, "later", parallel=True)
