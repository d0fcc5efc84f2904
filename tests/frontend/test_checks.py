"""Which questions about a batch's values are answered in a recording, and how."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from merakc.errors import RecordError
from merakc.frontend.record import record
from tests.frontend.against_eager import check
from tests.frontend.small import Small, linear, randn


def raise_if(s: Any, y: Tensor) -> Tensor:
    if y.max() > 1e3:
        raise ValueError(f"{y.max()} is too large")
    return y


def raise_unless(s: Any, y: Tensor) -> Tensor:
    if s.training and not (y.isfinite().all()):
        raise ValueError
    else:
        y = y * 2
    return y


def raise_with_a_message(s: Any, y: Tensor) -> Tensor:
    if y.isnan().any():
        logging.getLogger("tests").error("not a number")
        raise ValueError
    return y


def raise_in_an_elif(s: Any, y: Tensor) -> Tensor:
    if y.dim() == 7:
        y = y * 3
    elif y.isnan().any() or (y > 1e3).any():
        raise ValueError
    return y


def assertion(s: Any, y: Tensor) -> Tensor:
    assert (y < 1e3).all(), "too large"
    assert not y.isnan().any()
    return y


def by_item(s: Any, y: Tensor) -> Tensor:
    assert torch.all(y < 1e3).item(), "too large"
    return y


def distribution(s: Any, y: Tensor) -> Tensor:
    return torch.distributions.Normal(y, torch.ones_like(y)).log_prob(y * 2)


@pytest.mark.parametrize(
    "forward",
    [
        raise_if,
        raise_unless,
        raise_with_a_message,
        raise_in_an_elif,
        assertion,
        by_item,
        distribution,
    ],
)
def test_checks_are_passed(forward: Any) -> None:
    torch.manual_seed(0)
    model = Small(lambda s, x: forward(s, s.layer(x)).pow(2).sum(), layer=linear())
    check(model, randn(4, 6), relative=1e-14)


def chooses(s: Any, y: Tensor) -> Tensor:
    if y.max() > 1e3:
        y = y * 2
    return y


def warns_first(s: Any, y: Tensor) -> Tensor:
    if y.max() > 1e3:
        s.note = True
        raise ValueError
    return y


def caught(s: Any, y: Tensor) -> Tensor:
    try:
        if y.max() > 1e3:
            raise ValueError
    except ValueError:
        y = y * 2
    return y


def asked_inside(s: Any, y: Tensor) -> Tensor:
    if (not y.max() > 1e3) == s.training:
        raise ValueError
    return y


def asked_by_a_builtin(s: Any, y: Tensor) -> Tensor:
    if max(y.max(), y.min()) > 1e3:
        raise ValueError
    return y


def both_ways(s: Any, y: Tensor) -> Tensor:
    if y.max() > 1e3 and not y.min() > 0:
        raise ValueError
    return y


def item_compared(s: Any, y: Tensor) -> Tensor:
    assert (y > 1e3).any().item() is not True
    return y


def item_of_a_number(s: Any, y: Tensor) -> Tensor:
    assert y.max().item()
    return y


OTHER = (chooses, item_compared, item_of_a_number, warns_first, caught, asked_inside,
         asked_by_a_builtin, both_ways)  # fmt: skip


@pytest.mark.parametrize("forward", OTHER)
def test_other_questions_are_refused(forward: Any) -> None:
    model = Small(lambda s, x: forward(s, s.layer(x)).pow(2).sum(), layer=nn.Linear(6, 6))
    with pytest.raises(RecordError, match="control flow depends on the data"):
        record(model, (torch.ones(4, 6),), {})
