"""Data sets are dealt so that an epoch is the same samples, in the same batches, for every plan."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import pytest
import torch
from torch import nn

import merakc
from merakc.equality.ranks import run_ranks
from merakc.errors import ConfigError, MismatchError
from merakc.machines.cluster import NOMINAL_CPU
from merakc.train.data.loading import Dealt, Loader

SAMPLES, WIDTH = 23, 6


class Net(nn.Module):
    """A mean over samples, so that uneven parts count by their sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        return self.net(x).square().mean()


def rows() -> torch.Tensor:
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1)).double()


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def step(model: Any, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> float:
    loss = model(batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()  # type: ignore[no-any-return]


@dataclass
class Trained:
    """What a rank has of two epochs, with a last batch that is smaller and divides by nothing."""

    micro_batches: int
    losses: list[float]
    weights: dict[str, Any]
    own: list[int]  # the samples that a sampler deals it
    said: list[str]  # of ranks that part


def trained(layout: dict[str, Any], given: int) -> Trained:
    data, fixed = rows(), {"cluster": NOMINAL_CPU, **layout}
    plan = merakc.plan_for(net(), data[:given], **fixed)
    loader = merakc.dataloader(data, plan, 8, shuffle=True, seed=3)
    model = merakc.auto_parallel(net(), data[:given], plan=plan, cluster=NOMINAL_CPU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = [step(model, optimizer, batch) for _ in range(2) for batch in loader]
    weights = model.full_state_dict()
    parted = apart(model) if "dp" in layout else ([], [])
    return Trained(plan.micro_batches, losses, weights, *parted)


def apart(model: Any) -> tuple[list[int], list[str]]:
    """What a sampler deals a rank, and what is said where ranks do not go together."""
    ahead = Dealt(8, 0, 2, batch_size=4)
    ahead.epoch = model.rank
    own = [*merakc.sampler(range(22), model, shuffle=False)]
    said = []
    acts: list[Any] = [
        lambda: merakc.sampler(range(23), model),
        lambda: model(rows()[: 1 - model.rank]),
        lambda: [*ahead],
    ]
    for act in acts:
        try:
            act()
        except (ConfigError, MismatchError) as error:
            said.append(str(error))
    return own, said


@pytest.mark.parametrize(
    "layout", [{"dp": 2, "micro_batches": 4}, {"pp": 2, "micro_batches": 8}], ids=str
)
def test_a_run_is_that_of_one_process_and_ranks_that_part_are_told(layout: dict[str, Any]) -> None:
    model, data = net(), rows()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for epoch in range(2):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(3 + epoch))
        losses += [step(model, optimizer, data[k]) for k in order.split(8)]  # type: ignore[no-untyped-call]
    found = run_ranks(2, trained, layout, 8 // layout.get("dp", 1))
    for rank in found:
        assert rank.losses == pytest.approx(losses, rel=1e-10)
        assert rank.micro_batches == layout["micro_batches"]  # the last batch is in fewer
    for name, value in found[0].weights.items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-10, atol=1e-12)
    if "dp" in layout:
        assert sorted(found[0].own + found[1].own) == [*range(22)]
        assert "23 samples cannot be divided over dp=2" in found[0].said[0]
        assert "batches of [1, 0] samples" in found[0].said[1]
        assert "the ranks differ in the data loader's epoch" in found[0].said[2]


def test_every_sample_is_read_once() -> None:
    for size in (1, 2, 3):
        ranks = [Dealt(SAMPLES, rank, size, batch_size=5) for rank in range(size)]
        for batches in ranks:
            batches.shuffle = True
        epochs = [[*zip(*ranks, strict=True)] for _ in range(2)]
        read = [[*chain.from_iterable(map(chain.from_iterable, epoch))] for epoch in epochs]
        assert [*map(sorted, read)] == [[*range(SAMPLES)]] * 2
        assert read[0] != read[1]
        assert len(ranks[0]) == 5
    ranks[0].drop_last = True
    assert len([*ranks[0]]) == len(ranks[0]) == 4


@dataclass
class Place:
    """A data-parallel rank, and how many there are."""

    data_parallel_rank: int
    data_parallel_size: int


def loaders(size: int, **options: Any) -> list[Loader]:
    places = [Place(rank, size) for rank in range(size)]
    return [merakc.dataloader([*range(SAMPLES)], p, 5, shuffle=True, **options) for p in places]


def whole(ranks: list[Loader], most: int | None = None) -> list[list[int]]:
    """The next batches, put together of what the ranks read."""
    return [torch.cat(b).tolist() for b in islice(zip(*ranks, strict=True), most)]


def test_an_epoch_goes_on_where_it_was_left_on_another_dp() -> None:
    (alone,) = loaders(1)
    epochs = [whole([alone]) for _ in range(3)]
    assert epochs[0] != epochs[1]
    ranks = loaders(2, num_workers=2)  # which read ahead
    assert whole(ranks) == epochs[0]
    assert ranks[0].state_dict() == loaded(ranks[1])[0].state_dict()  # between two epochs
    assert whole(loaded(ranks[0])) == epochs[1]
    assert whole(ranks, 2) == epochs[1][:2]
    assert ranks[0].state_dict() == ranks[1].state_dict()
    others = loaded(ranks[0])
    assert whole(others) == epochs[1][2:]
    assert whole(others) == epochs[2]
    assert whole(loaded(ranks[0]), 1) == epochs[1][2:3]
    assert whole(loaded(loaded(ranks[0])[0])) == epochs[1][2:]  # before any is read
    with pytest.raises(ConfigError, match="batch_size 5, and 4 here"):
        merakc.dataloader([*range(SAMPLES)], Place(0, 1), 4, shuffle=True).load_state_dict(
            ranks[0].state_dict()
        )


def loaded(other: Loader) -> list[Loader]:
    """Three ranks that go on where another was."""
    ranks = loaders(3)
    for loader in ranks:
        loader.load_state_dict(other.state_dict())
    return ranks


def test_what_would_leave_ranks_without_samples_is_refused() -> None:
    batches = Dealt(SAMPLES, 0, 2, batch_size=11)
    with pytest.raises(ConfigError, match=r"a batch of 1 sample .* drop_last=True"):
        batches.check()
    batches.drop_last = True
    batches.check()
    with pytest.raises(ConfigError, match="Net: give the model that auto_parallel returned"):
        merakc.dataloader(rows(), net(), 8)  # type: ignore[arg-type]
