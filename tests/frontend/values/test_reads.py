"""What Python reads of the batch: the numbers it is told, and which batches say the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from merakc.errors import RecordError
from merakc.frontend.record import record
from merakc.frontend.values.reads import ValuesNeededError
from tests.frontend.against_eager import check
from tests.frontend.small import Small, here, linear, randn

LENGTHS = torch.tensor([6, 3, 5, 2])
MASK = torch.arange(6) < LENGTHS[:, None]
OTHER = torch.tensor([6, 1, 1, 2])  # as long at most, and at first


def guard(s: Any, y: Tensor, n: Tensor) -> Tensor:
    return y.pow(2).sum() / (n.sum() if n.sum() > 1 else 1)


def cut(s: Any, y: Tensor, n: Tensor) -> Tensor:
    return y[:, : int(n.max())].pow(2).sum()


def cut_by_tensor(s: Any, y: Tensor, n: Tensor) -> Tensor:
    return y[:, : n.max() - 1].pow(2).sum()


def cut_by_item(s: Any, y: Tensor, n: Tensor) -> Tensor:
    return y[:, : n.max().item()].pow(2).sum()


def first(s: Any, y: Tensor, n: Tensor) -> Tensor:
    return y[:, : n[0]].pow(2).sum()


def branch(s: Any, y: Tensor, n: Tensor) -> Tensor:
    return y.pow(2).sum() if n.max() > 5 and n[0].item() != 3 else y.sum()


def alike(s: Any, y: Tensor, n: Tensor) -> Tensor:
    return y.sum() if torch.equal(n, n.clamp(max=5)) else y.pow(2).sum()


def places(s: Any, y: Tensor, n: Tensor) -> Tensor:
    return y[torch.arange(4), (torch.arange(n.max().item())[None] < 1).sum(1)].sum()


@pytest.mark.parametrize(
    "forward", [guard, cut, cut_by_tensor, cut_by_item, first, branch, alike, places]
)
def test_a_number_is_told_and_asked_again(forward: Any) -> None:
    torch.manual_seed(0)
    model = Small(lambda s, x, n: forward(s, s.layer(x), n), layer=linear())
    recording = check(model, randn(4, 6), LENGTHS, relative=1e-13)
    reads = recording.reads
    assert reads is not None
    assert reads.of({"1": LENGTHS}) == reads.answers
    assert reads.of({"1": OTHER}) == reads.answers
    assert all(read.source == here(forward, 1) for read in reads.asked)
    assert "opaque" not in str(recording.graph)
    if forward is not guard:
        assert reads.difference({"1": LENGTHS - 3}).startswith(here(forward, 1))


def each(s: Any, y: Tensor, n: Tensor) -> Tensor:
    return torch.stack([row[:k].mean() for row, k in zip(y, n.tolist(), strict=True)]).sum()


def test_every_length_is_read() -> None:
    model = Small(lambda s, x, n: each(s, s.layer(x), n), layer=linear())
    reads = check(model, randn(4, 6), LENGTHS, relative=1e-13).reads
    assert reads is not None
    assert reads.answers == (6, 3, 5, 2)
    assert reads.of({"1": OTHER}) == (6, 1)  # as far as it is the same
    assert reads.difference({"1": OTHER}) == f"{here(each, 1)}: 3 in one, 1 in the other"


def test_what_constants_say_is_not_asked() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        scale = 2.0 if torch.ones(3).sum() > 2 else 3.0
        scale += torch.equal(torch.ones(3), torch.ones(4))
        spread = torch.corrcoef(s.layer(x).T)  # which asks whether there is more than one sample
        out: Tensor = spread.sum() * scale
        return out

    assert check(Small(forward, layer=linear()), randn(4, 6), relative=1e-13).reads is None


def test_floats_of_the_batch_are_read_too() -> None:
    model = Small(lambda s, x: s.layer(x).sum() * (2 if x.abs().sum() > 0 else 1), layer=linear())
    reads = check(model, randn(4, 6), relative=1e-13).reads
    assert reads is not None
    assert reads.difference({"0": torch.zeros(4, 6, dtype=torch.float64)})


def test_a_batch_without_values() -> None:
    model = Small(lambda s, x, n: cut(s, s.layer(x), n), layer=linear())
    with pytest.raises(ValuesNeededError, match="reads values of '1' of the batch"):
        record(model, (randn(4, 6), LENGTHS.to("meta")), {})


def test_what_a_parameter_stands_before_is_refused() -> None:
    model = Small(lambda s, x: s.layer(x)[: int(s.layer(x).argmax())].sum(), layer=linear())
    with pytest.raises(RecordError, match="control flow depends on the data"):
        record(model, (randn(4, 6),), {})
