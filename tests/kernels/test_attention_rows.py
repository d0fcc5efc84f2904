"""Causal attention from any row on is that part of the whole one."""

from __future__ import annotations

import pytest
import torch

from merakc.kernels.attention import attention
from merakc.kernels.attention_formulas import reference, reference_backward
from merakc.kernels.attention_rows import backward_of, forward_of

B, H, G, T, D = 2, 4, 2, 11, 8


def _inputs(value_dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = (B, T, H, D), (B, T, G, D), (B, T, G, value_dim)
    return [torch.randn(s, dtype=dtype).transpose(1, 2).requires_grad_() for s in shapes]


def _mask(kind: str) -> torch.Tensor | None:
    """Of a bool one some rows see no key before their own block."""
    if kind == "none":
        return None
    hidden = torch.rand(B, 1, T, T) < 0.4
    hidden[0, :, :, :6] = True
    hidden = hidden & ~torch.eye(T, dtype=torch.bool)
    if kind == "columns":
        return ~hidden[:, :, :1]
    return (
        ~hidden if kind == "bool" else torch.where(hidden, -torch.inf, torch.randn(T, T).double())
    )


@pytest.mark.parametrize("mask_kind", ["none", "bool", "float", "columns"])
@pytest.mark.parametrize("value_dim", [D, 5])  # torch's kernel; the formulas
def test_parts_are_those_of_the_whole(value_dim: int, mask_kind: str) -> None:
    """Values and gradients of blocks of rows, the first and an empty one among them."""
    q, k, v = _inputs(value_dim, torch.float64)
    mask = _mask(mask_kind)
    whole = attention(q, k, v, mask, causal=True)
    grad = torch.randn_like(whole)
    wanted = torch.autograd.grad(whole, (q, k, v), grad)
    outs, sums = [], [torch.zeros_like(x) for x in (q, k, v)]
    for first, last in ((0, 4), (4, 5), (5, 5), (5, T)):
        own = mask if mask is None or mask.shape[2] == 1 else mask[:, :, first:last]
        out = attention(q[:, :, first:last], k, v, own, causal=True, start=first)
        outs.append(out)
        for total, part in zip(
            sums, torch.autograd.grad(out, (q, k, v), grad[:, :, first:last]), strict=True
        ):
            total += part
    assert (torch.cat(outs, 2) - whole).abs().max() < 1e-12
    for found, true in zip(sums, wanted, strict=True):
        assert (found - true).abs().max() < 1e-12


def test_rows_beyond_the_last_key_see_all() -> None:
    q, k, v = _inputs(D, torch.float64)
    out = attention(q, k[:, :, :3], v[:, :, :3], causal=True, start=5)
    assert (out - attention(q, k[:, :, :3], v[:, :, :3])).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_parts_are_merged_in_float32(dtype: torch.dtype) -> None:
    q, k, v = _inputs(D, dtype)
    out = attention(q[:, :, 6:], k, v, causal=True, start=6)
    exact = attention(*(x.double() for x in (q, k, v)), causal=True)[:, :, 6:]
    assert out.dtype == dtype
    assert (out - exact).abs().max() < 4 * torch.finfo(dtype).eps


def test_layouts_are_the_kernels() -> None:
    """As traced: [b, s, h, d] in memory, [b, s, h] for the sums."""
    q, k, v = (x.detach() for x in _inputs(D, torch.float64))
    out, logsumexp = forward_of(reference)(q[:, :, 6:], k, v, None, True, 1.0, 6)
    rows = T - 6
    assert out.stride() == (rows * H * D, D, H * D, 1)
    assert logsumexp.stride() == (rows * H, 1, H)
    grads = backward_of(reference_backward)(
        out, q[:, :, 6:], k, v, out, logsumexp, None, True, 1.0, 6
    )
    for grad, heads, length in zip(grads, (H, G, G), (rows, T, T), strict=True):
        assert grad.stride() == (length * heads * D, D, heads * D, 1)
