"""Guards against numbers that are not finite: recorded where a finite loss proves them idle."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from merakc.errors import RecordError
from merakc.frontend.record import record
from tests.frontend.against_eager import check
from tests.frontend.small import Small, here, linear, randn


def returns(s: Any, y: Tensor) -> Tensor:
    loss = y.pow(2).mean()
    if torch.isnan(loss):
        return loss * 0
    return loss


def replaced(s: Any, y: Tensor) -> Tensor:
    loss = y.pow(2).mean()
    if not torch.isfinite(loss).all():
        loss = torch.zeros_like(loss)
    return loss / 2


def either(s: Any, y: Tensor) -> Tensor:
    loss = y.pow(2).mean()
    if torch.isnan(loss).any() | torch.isinf(loss):
        loss = loss.detach()
    return loss + y.sum()


def by_number(s: Any, y: Tensor) -> Tensor:
    loss = y.pow(2).mean()
    if math.isnan(loss.item()) or not math.isfinite(loss.detach().item()):
        loss = loss * 0
    return loss


def of_a_term(s: Any, y: Tensor) -> Tensor:
    terms = y.pow(2)
    if terms.isinf().any():
        terms = terms.clamp(max=1.0)
    return 3 * terms.sum() - y.mean()


@pytest.mark.parametrize("forward", [returns, replaced, either, by_number, of_a_term])
def test_a_finite_loss_proves_them_idle(forward: Any) -> None:
    torch.manual_seed(0)
    model = Small(lambda s, x: forward(s, s.layer(x)), layer=linear())
    recording = check(model, randn(4, 6), relative=1e-13)
    assert recording.finite == (here(forward, 2),)


def clamped(s: Any, y: Tensor) -> Tensor:
    if torch.isinf(y).any():
        y = y.clamp(max=1.0)
    return y.tanh().sum()


def divides(s: Any, y: Tensor) -> Tensor:
    n = y.pow(2).sum()
    if torch.isinf(n):
        n = n * 0 + 1
    return y.mean() / n


def compared(s: Any, y: Tensor) -> Tensor:
    loss = y.pow(2).mean()
    if torch.isnan(loss) | (loss > 1e3):
        loss = loss * 0
    return loss


def compared_number(s: Any, y: Tensor) -> Tensor:
    loss = y.pow(2).mean()
    if math.isnan(loss.item() + 1):
        loss = loss * 0
    return loss


@pytest.mark.parametrize("forward", [clamped, divides, compared, compared_number])
def test_others_are_refused(forward: Any) -> None:
    model = Small(lambda s, x: forward(s, s.layer(x)), layer=linear())
    with pytest.raises(RecordError, match="control flow depends on the data"):
        record(model, (randn(4, 6),), {})


def test_a_guard_inside_a_module_that_no_loss_proves_runs_as_it_is() -> None:
    torch.manual_seed(0)
    inner = Small(lambda s, x: clamped(s, s.layer(x)), layer=linear())
    recording = check(Small(lambda s, x: s.inner(x), inner=inner), randn(4, 6), relative=1e-13)
    assert not recording.finite
    assert "merakc.opaque" in str(recording.graph)


@pytest.mark.filterwarnings("ignore:what the forward prints")
def test_numbers_are_printed_and_logged(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        loss = s.layer(x).pow(2).mean()
        print("loss", loss.item(), "of", (s.layer(x) > 0).sum().item())  # noqa: T201
        logging.getLogger("forward").warning("loss %.3f and %s", loss.item(), loss.item())
        return loss

    check(Small(forward, layer=linear()), randn(4, 6), relative=1e-13)
    assert "loss zuf" in capsys.readouterr().out
    assert "loss %.3f and %s (zuf" in caplog.text
    assert "__format__" not in vars(torch.SymFloat)


def test_a_question_of_what_is_computed_in_many_ways_is_refused_at_once() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = z = s.layer(x).sum()
        for _ in range(60):
            y, z = y * z, y + z  # 2 ** 60 ways
        return z if y > 1 else y

    with pytest.raises(RecordError, match="control flow depends on the data"):
        record(Small(forward, layer=linear()), (randn(4, 6),), {})
