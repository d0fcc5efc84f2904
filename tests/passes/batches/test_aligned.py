"""What Python makes of the batch, sample by sample, is that of the whole batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from merakc.errors import RecordError
from merakc.passes.batches.aligned import KNOWN, is_own
from merakc.passes.batches.alike import OtherPathError
from merakc.passes.batches.states import Kind
from tests.passes.batches.forwards import Batch, Loss, Small, check, in_parts, make_batch


def positions(b: Batch) -> Tensor:
    """Numbers for each sample, made of what Python reads of it, and of how many came before."""
    found, before = torch.zeros(len(b["label"]), 3, dtype=torch.float64), 0
    for k, label in enumerate(b["label"].tolist()):
        found[k, : label + 1] = torch.arange(label + 1) + before
        before += label
    return found


def rows_of_python(b: Batch) -> Tensor:
    return torch.cat([torch.arange(3)[None] * int(k) for k in b["label"]])


ROWS: dict[str, Loss] = {
    "positions": lambda m, z, b: (z * positions(b)).sum(),
    "joined": lambda m, z, b: (z * rows_of_python(b)).square().sum(),
    "words": lambda m, z, b: (m.table(rows_of_python(b).clamp(max=4)).sum(1) * z).sum(),
    "beside a count": lambda m, z, b: (z * positions(b)).sum() / b["mask"].sum(),
    "a largest number": lambda m, z, b: (z[:, : int(b["label"].max()) + 1]).square().sum(),
}


@pytest.mark.parametrize("name", ROWS)
def test_it_is_a_value_of_the_whole_batch(name: str) -> None:
    step = check(ROWS[name])
    assert step.loss.kind is Kind.SUM
    assert step.splits[0].head is None


def test_the_way_to_it_is_that_of_the_whole_batch() -> None:
    step = in_parts(ROWS["positions"])
    found = step.found[0]
    assert sum(n.op == KNOWN for n in found.part.nodes) == 1
    assert not any(is_own(n.name) for n in found.part.nodes)
    assert not any("slice" in n.op for n in step.graph.nodes)
    known = step.splits[0].known
    assert known is not None
    assert sum("slice_scatter" in n.op for n in known.whole.graph.nodes) >= 6


def test_calls_behind_parameters_are_the_same_for_all() -> None:
    def one_by_one(m: Small, z: Tensor, b: Batch) -> Tensor:
        return torch.stack([m.other(x).sum() * k for k, x in enumerate(b["x"])]).sum() + z.sum()

    with pytest.raises(OtherPathError, match="one by one"):
        in_parts(one_by_one)


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
    step = check(PLACES[name], turned())
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
            lambda m, z, b: (z.reshape(-1)[crossing(b)] * b["target"].reshape(-1)).sum(), turned()
        )
