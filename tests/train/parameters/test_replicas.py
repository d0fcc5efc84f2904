"""What is done to weights on one rank alone is seen on all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import merakc
from benchmarks.ranks import run_ranks
from merakc.errors import MismatchError
from merakc.ir.layout import parse_layout
from merakc.ir.program import Mesh
from merakc.machines.cluster import NOMINAL_CPU
from merakc.runtime.groups import Groups
from merakc.runtime.part import plain
from merakc.runtime.state import Placement
from merakc.train.parameters.replicas import Replicas
from tests.train.parameters.test_norms import Tied, batch


def noisy(layout: dict[str, Any]) -> tuple[list[float], str]:
    """The losses of steps with noise of one seed, and what is said where seeds differ."""
    model = merakc.auto_parallel(Tied(), batch(0, 2), cluster=NOMINAL_CPU, **layout)

    def steps(seeds: Sequence[int]) -> list[float]:
        losses = []
        for seed in seeds:
            torch.manual_seed(seed)
            with torch.no_grad():
                for p in model.parameters():
                    plain(p).add_(0.1 * torch.randn(p.shape).double().sum())
            losses.append(model(batch(0, 2))["loss"].item())
        return losses

    losses = steps(range(4))
    with pytest.raises(MismatchError) as told:
        steps([model.rank] * 4)  # some parameters are compared in each
    return losses, str(told.value)


class Scaled(nn.Module):
    """A buffer that it reads, one of its statistics, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.tensor([2.0, math.inf]))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss; what has been seen is counted."""
        self.seen += 1
        return (self.norm(self.layer(x)) * self.scale[0]).square().mean()


def scaled() -> str:
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    model = merakc.auto_parallel(Scaled(), x, dp=2, cluster=NOMINAL_CPU)
    own = x[model.rank :: 2]

    def steps() -> None:
        for _ in range(8):
            model(own).backward()

    steps()
    model.scale.mul_(2)
    steps()
    if model.rank:
        model.scale[0].mul_(0.5)
    with pytest.raises(MismatchError) as told:
        steps()
    return str(told.value)


def test_buffers_that_differ() -> None:
    for told in run_ranks(2, scaled):
        assert "ranks that hold the same elements of 'scale'" in told


def test_those_that_have_the_same_part_of_what_two_axes_split() -> None:
    mesh = Mesh(dp=2, tp=2, cp=2, experts=True)
    layouts = {"experts": "8*2/2 x 4*2", "heads": "6 x 4*2", "rows": "8*2/2 x 4", "scale": "4"}
    placements = {
        name: Placement(parse_layout(text), torch.float64, (0,), (0,), True, True)
        for name, text in layouts.items()
    }
    found: dict[tuple[str, int], list[int]] = {}
    for rank in range(mesh.world_size):
        lane, layout_of = mesh.coordinates(rank)[2], placements.items()
        state = {n: torch.zeros(p.layout.local_shape(4, lane)) for n, p in layout_of}
        factors = Replicas(placements, Groups(mesh, rank), state, None).factors
        for name, place in layout_of:
            found.setdefault((name, place.layout.holder(lane)), []).append(factors[name])
    holders = {"experts": (4, 2), "heads": (2, 4), "rows": (2, 4), "scale": (1, 8)}
    for name, (parts, copies) in holders.items():
        of = [own for (n, _), own in found.items() if n == name]
        assert [sorted(own) for own in of] == [[*[-1] * (copies - 1), copies - 1]] * parts


@pytest.mark.parametrize("layout", [{"dp": 2, "state_shards": "zero-0"}, {"tp": 2}], ids=str)
def test_weights_that_differ(layout: dict[str, Any]) -> None:
    (losses, told), (others, also) = run_ranks(2, partial(noisy, layout))
    assert losses == others
    assert told == also
    assert "load, initialise and change weights on all ranks alike" in told


class Odd(nn.Module):
    """With an odd width, of which one rank of tp has more, before what all have alike."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(16, 65), nn.Linear(65, 16)
        self.place = nn.Parameter(torch.randn(200, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        return (self.down(self.up(x).relu()) + self.place).square().mean()


def shards_of_other_elements() -> list[float]:
    x = torch.ones(4, 200, 16)
    model = merakc.auto_parallel(Odd(), x, dp=2, tp=2, state_shards="zero-1", cluster=NOMINAL_CPU)
    assert any("65*" in layout for layout in model.plan.splits.values())
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(4):
        loss = model(x)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_shards_that_lie_otherwise_on_ranks_of_tp_are_not_compared_with_each_other() -> None:
    losses, *others = run_ranks(4, shards_of_other_elements)
    assert losses[-1] < losses[0]
    assert all(other == losses for other in others)
