"""Checks that places chosen by calls always pass, and those that may fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from merakc.frontend.calls.places import counted
from merakc.frontend.record import record
from merakc.kernels.opaque import OPAQUE
from tests.frontend.small import Small, linear, randn

CERTAIN = [
    lambda y: F.one_hot(y.argmax(-1), 6),
    lambda y: F.one_hot(y.argmin(0), 4),
    lambda y: F.one_hot(y.argmin(), 24),
    lambda y: F.one_hot(y.topk(2).indices.flatten(), 8),
    lambda y: F.one_hot(y.topk(2, 0)[1].T[:, 0], 4),
    lambda y: F.one_hot(y.max(1, keepdim=True).indices.squeeze(1), num_classes=6),
    lambda y: F.one_hot(y.sort(descending=True).indices[..., :2], 6),
    lambda y: F.one_hot(y.argsort(dim=0), 4),
]
UNCERTAIN = [
    lambda y: F.one_hot(y.argmax(-1), 5),
    lambda y: F.one_hot(y.argmax(-1) - 1, 6),
    lambda y: F.one_hot(y.argmin(), 6),
    lambda y: F.one_hot(y.topk(2, 0)[1], 3),
    lambda y: F.one_hot(y.topk(2).values.long(), 6),
    lambda y: F.one_hot(y.round().long(), 6),
]


@given(st.integers(1, 9), st.integers(0, 40))
def test_places_are_counted(size: int, count: int) -> None:
    places = torch.randint(size, (count,), generator=torch.Generator().manual_seed(count))
    assert torch.equal(counted(places, size), torch.bincount(places, minlength=size))


COUNTED = [
    lambda y: y.argmax(-1).bincount(minlength=6),
    lambda y: torch.bincount(y.topk(2).indices.flatten().sort()[0], minlength=9),
    lambda y: torch.bincount(y.argmax(-1)[y.argmax(0)[:2]].int(), None, 6),
]
NOT_COUNTED = [
    lambda y: y.argmax(-1).bincount(minlength=5),
    lambda y: y.argmax(-1).bincount(),
    lambda y: (y.argmax(-1) + 1).bincount(minlength=6),
    lambda y: y.argmax(-1).bincount(y.amax(-1), minlength=6),
    lambda y: y.argsort().flatten().to(torch.int8).bincount(minlength=6),
]


def calls_of(count: Any) -> list[str]:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.layer(x)
        return y.sum() * count(y).sum()

    return [n.op for n in record(Small(forward, layer=linear()), (randn(4, 6),), {}).graph.nodes]


@pytest.mark.parametrize("count", COUNTED)
def test_counts_of_places_have_one_shape(count: Any) -> None:
    assert "aten.histc.default" in calls_of(count)


@pytest.mark.parametrize("count", NOT_COUNTED)
def test_other_counts_are_as_many_as_the_data_says(count: Any) -> None:
    calls = calls_of(count)
    assert OPAQUE in calls
    assert "aten.histc.default" not in calls


def unheard(places: Any) -> tuple[str, ...]:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.layer(x)
        return y.sum() * places(y).sum()

    return record(Small(forward, layer=linear()), (randn(4, 6),), {}).aside.unheard


@pytest.mark.parametrize("places", CERTAIN)
def test_a_check_that_passes_always_is_not_told(places: Any) -> None:
    assert unheard(places) == ()


@pytest.mark.parametrize("places", UNCERTAIN)
def test_a_check_that_may_fail_is_told(places: Any) -> None:
    assert unheard(places) != ()
