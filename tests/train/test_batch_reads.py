"""Numbers that a forward reads of its batch, in steps on several ranks."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import merakc
from benchmarks.ranks import run_ranks
from merakc.errors import MerakError
from merakc.frontend.record import record
from merakc.machines.cluster import NOMINAL_CPU
from merakc.train.batch_reads import BatchReads
from tests.battery.small_models import WIDTH, Tensors, assert_close, build, warm_up

LENGTH = 6


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    warm_up()


class Cut(nn.Module):
    """Rows up to the longest length, and at least one to divide by."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> Any:
        """The loss and a number."""
        y = self.layers(x)[:, : int(lengths.max())]
        return y.square().mean() * max(1, (lengths > 0).any()), (y > 0).double().mean().item()


def batch(longest: int, other: int = 0, seed: int = 0) -> dict[str, torch.Tensor]:
    """Four samples, of which the first and third are long."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    return {"x": x, "lengths": torch.tensor([longest, 1, other or longest, 2])}


def one_process(given: Tensors) -> tuple[float, float, Tensors]:
    model = build(Cut)
    loss, number = model(**given)
    loss.backward()
    return loss.item(), number, {n: p.grad for n, p in model.named_parameters()}


@dataclass
class Trained:
    """What a rank has of each batch: the loss, a number, the gradients; and how many steps were
    compiled so far. What it was told of the first that is refused.
    """

    found: list[tuple[float, float, Tensors]]
    compiled: list[int]
    said: str = ""


def train(given: list[Tensors], options: dict[str, Any]) -> Trained:
    dp = options.get("dp", 1)
    first = {n: v.chunk(dp)[0] for n, v in given[0].items()}
    model = merakc.auto_parallel(build(Cut), first, cluster=NOMINAL_CPU, **options)
    trained = Trained([], [])
    for whole in given:
        own = {n: v.chunk(dp)[model.data_parallel_rank] for n, v in whole.items()}
        model.zero_grad()
        try:
            loss, _ = model(**own)
        except MerakError as error:
            trained.said = str(error)
            break
        loss.backward()
        _, number = model.predict(**own)
        trained.found.append((loss.item(), number, copy.deepcopy(model.full_gradients())))
        trained.compiled.append(len(model._steps.compiled))
    return trained


class Weighed(nn.Module):
    """A loss that counts more where the whole batch has many labels, which no part says."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean() * (3 if mask.sum() > 4 else 1)


def test_what_is_read_of_the_whole_batch_has_its_step_too() -> None:
    plain, x = build(Weighed), batch(1)["x"][:, 0].repeat(2, 1)
    parallel = merakc.auto_parallel(
        build(Weighed), {"x": x, "mask": torch.ones(8)}, micro_batches=4, cluster=NOMINAL_CPU
    )
    for count in (8, 4, 8, 0):  # no part of two has more than four
        given = {"x": x, "mask": (torch.arange(8) < count).double()}
        assert parallel(**given).item() == pytest.approx(plain(**given).item(), rel=1e-12)


@pytest.mark.parametrize("options", [{"pp": 2, "micro_batches": 2}, {"dp": 2, "micro_batches": 1}])
def test_each_answer_has_its_step(options: dict[str, Any]) -> None:
    """Micro-batches that would answer differently are given what answers whole; dp ranks that do
    are refused.
    """
    given = [batch(5), batch(3, seed=1), batch(5, seed=2), batch(5, 4)]
    first, second = run_ranks(2, train, given, options)
    for (loss, number, gradients), one in zip(first.found, given, strict="dp" not in options):
        wanted = one_process(one)
        assert loss == pytest.approx(wanted[0], rel=1e-12)
        assert isinstance(number, float)
        if "dp" not in options:
            assert number == pytest.approx(wanted[1], rel=1e-12)
        assert_close(gradients, wanted[2])
    assert first.compiled[2] == 4  # two answers, each with and without results
    assert len(first.found) == (3 if "dp" in options else 4)
    told = re.compile(r"on dp ranks \[1\] than on dp rank 0: .*test_batch_reads", re.DOTALL)
    for rank in (first, second):
        assert bool(told.search(rank.said)) == ("dp" in options)


def test_keys() -> None:
    reads, given = BatchReads(), batch(5)
    found = record(build(Cut), (), given).reads
    assert reads.add("key", None, None) == "key"
    assert reads.add("key", found, None) == ("key", (5, False), None)
    asked = []

    def parts(number: int) -> list[Tensors]:
        asked.append(number)
        return [given, batch(5, 5)]

    assert reads.key("other", parts) == "other"
    assert not asked  # a model that reads nothing pays nothing
    assert reads.key("key", parts) == ("key", (5, False), None)
    assert reads.key("key", lambda _: [given, batch(4)]) == "key"
