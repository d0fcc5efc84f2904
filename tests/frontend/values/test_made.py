"""`torch.tensor` of lists that hold tensors and numbers of a recording."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from merakc.frontend.values.made import recorded_tensors
from tests.frontend.against_eager import check
from tests.frontend.small import Small, linear, randn


def of_tensors(s: Any, y: Tensor) -> Tensor:
    return torch.tensor([y.detach().max(), 2.0, y.detach().min()])


def of_numbers(s: Any, y: Tensor) -> Tensor:
    return torch.tensor([[y.max().item(), 1.0], [3.0, y.min().item()]], dtype=torch.float64)


def of_a_number(s: Any, y: Tensor) -> Tensor:
    return torch.tensor(y.max().item(), dtype=torch.float64)


@pytest.mark.parametrize("made", [of_tensors, of_numbers, of_a_number])
def test_they_are_recorded(made: Any) -> None:
    torch.manual_seed(0)

    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.layer(x)
        out: Tensor = (y.pow(2).sum() * made(s, y)).sum()
        return out

    check(Small(forward, layer=linear()), randn(4, 6), relative=1e-13)


def test_others_are_made_as_ever() -> None:
    before = torch.tensor
    with recorded_tensors():
        assert torch.tensor([1, 2]).tolist() == [1, 2]
        assert torch.tensor is not before
    assert torch.tensor is before
