"""The plain formulas of attention: sums of half precision, biases and layouts."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from merakc.kernels.attention_formulas import (
    bias_of,
    empty_bshd,
    lse_dtype,
    reference,
    reference_backward,
    rows,
    to_bsh,
    to_bshd,
)


def test_gradients_are_those_of_torch() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 5, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    grad = torch.randn(2, 4, 5, 8, dtype=torch.float64)
    wanted = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True),
                                 (q, k, v), grad)  # fmt: skip
    with torch.no_grad():
        out, logsumexp = reference(q, k, v, None, True, 8**-0.5)
        found = reference_backward(grad, q, k, v, out, logsumexp, None, True, 8**-0.5)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_a_causal_mask_joins_another() -> None:
    seen = torch.tensor([[True, True, False]])
    bias, causal = bias_of(seen, True, 2, 3, torch.float32)
    assert not causal
    assert bias is not None
    assert bias[0, 0].tolist() == [[0.0, -torch.inf, -torch.inf], [0.0, 0.0, -torch.inf]]


def test_layouts() -> None:
    x = torch.randn(2, 3, 4, 5)
    assert to_bshd(x, x.dtype).stride() == empty_bshd(x, x).stride() == (60, 5, 15, 1)
    assert to_bsh(x[..., 0]).stride() == (12, 1, 3)
    assert torch.equal(to_bshd(x, x.dtype), x)
    assert rows(x.transpose(2, 3)).stride(-1) == 1
    assert lse_dtype(torch.bfloat16) is torch.float32
