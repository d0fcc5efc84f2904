"""Ranks of a replica that would compile steps that do not fit each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import merakc
from benchmarks.ranks import run_ranks
from merakc.errors import MismatchError
from merakc.machines.cluster import NOMINAL_CPU
from merakc.passes.sharding.layouts import Sharding

LAYOUTS = [{"pp": 2}, {"cp": 2}]
DP = {"dp": 2}
LENGTH, LONGER = 6, 8
BY_RANK = {"on": False}


class Layers(nn.Module):
    """Layers of which a batch of another length goes by the rank, as the example's does not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        scale = 1.0
        if BY_RANK["on"] and x.shape[1] != LENGTH:
            scale += dist.get_rank()
        return (self.down(self.up(x).relu()) * scale).square().mean()


def refused(layout: dict[str, Any], *, by_rank: bool, more: int = 0) -> str:
    """What a batch of another length says, of `more` samples on each further rank."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = merakc.auto_parallel(
        Layers(), torch.ones(2, LENGTH, 4), cluster=NOMINAL_CPU, micro_batches=1, **layout
    )
    model(torch.ones(2, LENGTH, 4)).backward()
    if by_rank:
        BY_RANK["on"] = True
    elif rank:
        said = Sharding.told
        Sharding.told = lambda own: f"{said(own)} otherwise"  # type: ignore[method-assign]
    try:
        model(torch.ones(2 + more * rank, LONGER, 4)).backward()
    except MismatchError as error:
        return str(error)
    finally:
        BY_RANK["on"] = False
        if not by_rank and rank:
            Sharding.told = said  # type: ignore[method-assign]
    return "trained"


def every() -> list[str]:
    found = [refused(layout, by_rank=True) for layout in LAYOUTS]
    found.append(refused({"tp": 2}, by_rank=False))
    return [*found, refused(DP, by_rank=True), refused(DP, by_rank=True, more=1)]


@pytest.fixture(scope="module")
def told() -> list[list[str]]:
    return run_ranks(2, every)


def test_a_forward_that_goes_by_the_rank_is_refused_on_every_rank(told: list[list[str]]) -> None:
    for own in told:
        for text in own[: len(LAYOUTS)]:
            assert "ranks 0 and 1 have recorded different forwards of this batch" in text
            assert "must not go by the rank" in text


def test_steps_that_are_split_otherwise_are_refused_on_every_rank(told: list[list[str]]) -> None:
    for own in told:
        assert "ranks 0 and 1 have split this batch's step otherwise" in own[len(LAYOUTS)]


def test_so_is_one_of_data_parallel_ranks(told: list[list[str]]) -> None:
    for own in told:
        for text in own[len(LAYOUTS) + 1 :]:
            assert "ranks [1] have recorded another forward than rank 0" in text
