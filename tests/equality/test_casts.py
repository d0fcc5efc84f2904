"""The modes under which both sides run: float64 throughout, and nothing dropped."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from merakc.equality.casts import lifted_casts, without_dropout


def test_lifted_casts_reach_every_spelling() -> None:
    x = torch.ones(2, dtype=torch.float64)
    with lifted_casts():
        lifted = [
            x.float(),
            x.to(torch.float32),
            x.to(dtype=torch.float32),
            x.type(torch.float32),
            F.softmax(x, dim=-1, dtype=torch.float32),
            torch.zeros(2, dtype=torch.float32),
        ]
        assert x.to(torch.int32).dtype == torch.int32
        assert x.view(torch.uint8).view(torch.float32).shape == (4,)  # the same bits
    assert {t.dtype for t in lifted} == {torch.float64}
    assert x.float().dtype == torch.float32


def test_casts_of_a_custom_backward_are_lifted() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: object, handed: torch.Tensor) -> torch.Tensor:
            return (2 * handed.float()).double()

    x = torch.full((), 1 / 3, dtype=torch.float64, requires_grad=True)
    with lifted_casts():
        (Doubled.apply(x) * (1 / 3)).backward()
    assert x.grad == 2 / 3  # float32 would round it


def test_products_of_groups_are_there_in_float64() -> None:
    x, w = torch.randn(5, 4, dtype=torch.float64), torch.randn(2, 4, 3, dtype=torch.float64)
    offs = torch.tensor([2, 5], dtype=torch.int32)
    with lifted_casts():
        found = F.grouped_mm(x, w, offs=offs)
    assert torch.equal(found, torch.cat([x[:2] @ w[0], x[2:] @ w[1]]))


@pytest.mark.parametrize(
    "drop",
    [
        lambda x: F.dropout(x, 0.9, training=True),
        lambda x: torch.dropout(x, 0.9, True),
        lambda x: nn.Dropout(0.9)(x),
        lambda x: nn.Dropout2d(0.9)(x),
        lambda x: F.alpha_dropout(x, 0.9, training=True),
        lambda x: F.dropout(input=x, p=0.9, inplace=True),
    ],
)
def test_nothing_is_dropped(drop: object) -> None:
    assert callable(drop)
    x = torch.ones(1, 3, 8, 8)
    assert not torch.equal(drop(x.clone()), x)
    with without_dropout():
        assert torch.equal(drop(x.clone()), x)


def test_attention_drops_nothing() -> None:
    q = torch.randn(1, 2, 16, 4)
    layer = nn.MultiheadAttention(8, 2, dropout=0.9, batch_first=True)
    x = torch.randn(2, 16, 8)
    calls = [
        lambda: F.scaled_dot_product_attention(q, q, q, dropout_p=0.9),
        lambda: F.scaled_dot_product_attention(q, q, q, None, 0.9),
        lambda: layer(x, x, x)[0],
    ]
    for call in calls:
        assert not torch.equal(call(), call())
        with without_dropout():
            assert torch.equal(call(), call())
    plain = F.scaled_dot_product_attention(q, q, q)
    with without_dropout():
        assert torch.equal(calls[0](), plain)
