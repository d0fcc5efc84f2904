"""Losses of scores in blocks, and their gradients, are those of whole scores."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from merakc.kernels import scores
from merakc.kernels.scores import add_scores_backward
from merakc.kernels.vocabulary import linear_cross_entropy


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven classes of five rows."""
    monkeypatch.setattr(scores, "ROWS", 5)
    monkeypatch.setattr(scores, "BLOCK_BYTES", 5 * 7 * 8)


def values(*shapes: tuple[int, ...]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=draw, dtype=torch.float64).requires_grad_() for s in shapes]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_losses_and_gradients(reduction: str, with_bias: bool) -> None:
    x, weight, *bias = values((13, 6), (23, 6), *[(23,)] * with_bias)
    labels = torch.arange(13) % 23
    labels[3] = -100
    wanted = F.cross_entropy(F.linear(x, weight, *bias), labels, reduction=reduction)
    number = ("none", "mean", "sum").index(reduction)
    found = linear_cross_entropy(x, weight, *(bias or [None]), labels, number, -100, 23)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)
    tangent = torch.linspace(1, 2, found.numel(), dtype=torch.float64).view(found.shape)
    leaves = [x, weight, *bias]
    for own, plain in zip(
        torch.autograd.grad(found, leaves, tangent),
        torch.autograd.grad(wanted, leaves, tangent),
        strict=True,
    ):
        torch.testing.assert_close(own, plain, rtol=1e-12, atol=1e-13)


def test_gradients_of_weights_are_added_up() -> None:
    x, weight, of_total, of_picked = (v.detach() for v in values((13, 6), (23, 6), (13,), (13,)))
    labels = torch.arange(13)
    total, _ = scores.scores(x, weight, None, labels, 0, 23, -100, False)
    rest = (of_total, of_picked, x, weight, None, labels, total, 0, False, True, True, False)
    made, of_x, of_bias = add_scores_backward(None, False, *rest)
    there = torch.ones(23, 6, dtype=torch.float64)
    added, *_ = add_scores_backward(there, True, *rest)
    assert added is there
    torch.testing.assert_close(there - 1, made)
    written, *_ = add_scores_backward(there, False, *rest)
    torch.testing.assert_close(written, made)
    assert (of_x.shape, of_bias.numel()) == (x.shape, 0)


def test_rows_without_a_finite_score_give_what_torch_gives() -> None:
    x, weight = torch.ones(2, 1), torch.arange(23.0).view(23, 1)
    bias = torch.full((23,), -torch.inf)
    bias[20] = 0.0
    labels = torch.tensor([20, 3])
    found = linear_cross_entropy(x, weight, bias, labels, 0, -100, 23)
    assert torch.equal(found, F.cross_entropy(F.linear(x, weight, bias), labels, reduction="none"))


def test_a_label_that_is_no_class_is_refused() -> None:
    x, weight = (v.detach() for v in values((3, 4), (16, 4)))
    with pytest.raises(RuntimeError, match="a label is none of 16 classes and not -100"):
        scores.scores(x, weight, None, torch.tensor([0, -100, 16]), 0, 16, -100, False)
