"""Places that the batch says, each in its own sample."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from merakc.errors import RecordError
from merakc.passes.batches.states import Kind
from tests.passes.batches.forwards import Batch, Loss, check, make_batch


# Places within each sample, of three numbers each.
def places(b: Batch) -> Tensor:
    return (b["turn"].argsort(1) + torch.arange(len(b["turn"]))[:, None] * 3).reshape(-1)


def put(z: Tensor, b: Batch) -> Tensor:
    target = b["target"].clone()
    rows = torch.arange(len(z)).unsqueeze(1).expand(-1, 2).reshape(-1) + 0 * b["label"].sum()
    columns = b["turn"].argsort(1)[:, :2].reshape(-1)
    out = target * 1 + z * 0
    out[rows, columns] = z[rows, columns + 0 * rows] * 3
    return out


PLACES: dict[str, Loss] = {
    "turned": lambda m, z, b: (
        z.reshape(-1)[places(b)] * b["target"].reshape(-1)).square().sum(),
    "some of each": lambda m, z, b: (
        z.reshape(-1)[places(b).view(-1, 3)[:, 1:].reshape(-1)].view(-1, 2) * b["x"][:, :2]).sum(),
    "there and back": lambda m, z, b: (
        z.reshape(-1)[places(b)].tanh()[places(b).argsort()] * b["target"].reshape(-1)).sum(),
    "put": lambda m, z, b: (put(z, b) * b["target"]).square().sum(),
}  # fmt: skip


def turned() -> Batch:
    batch = make_batch()
    draw = torch.Generator().manual_seed(3)
    return {**batch, "turn": torch.rand(len(batch["x"]), 3, generator=draw).double()}


@pytest.mark.parametrize("name", PLACES)
def test_places_within_samples_are_those_of_a_part(name: str) -> None:
    step = check(PLACES[name], turned(), placing=True)
    assert step.loss.kind is Kind.SUM
    assert any(n.op == "merakc.local.default" for n in step.graph.nodes)


@pytest.mark.parametrize(
    "crossing",
    [
        lambda b: places(b).flip(0),
        lambda b: places(b).roll(3),
        lambda b: places(b).roll(1),
        lambda b: places(b) * 0,
    ],
)
def test_places_in_other_samples_are_refused_where_they_are_found(crossing: object) -> None:
    assert callable(crossing)
    with pytest.raises(RecordError, match="from one sample to another"):
        check(
            lambda m, z, b: (z.reshape(-1)[crossing(b)] * b["target"].reshape(-1)).sum(),
            turned(),
            placing=True,
        )


def test_unasked_they_couple() -> None:
    step = check(PLACES["turned"], turned())
    assert step.splits[0].head is not None
