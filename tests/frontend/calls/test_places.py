"""Checks that places chosen by calls always pass, and those that may fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

from merakc.frontend.record import record
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
