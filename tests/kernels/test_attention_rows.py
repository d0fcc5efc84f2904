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


@pytest.mark.parametrize("start", [None, 3])  # of causal rows
@pytest.mark.parametrize("mask_kind", ["none", "bool", "float"])
@pytest.mark.parametrize("value_dim", [D, 5])
def test_a_sink_is_a_key_of_value_zero(value_dim: int, mask_kind: str, start: int | None) -> None:
    q, k, v = _inputs(value_dim, torch.float64)
    first, causal = start or 0, start is not None
    sink = torch.randn(H, dtype=torch.float64, requires_grad=True)
    mask = _mask(mask_kind)
    rows, mask = q[:, :, first:], mask if mask is None else mask[:, :, first:]
    out = attention(rows, k, v, mask, causal, 0.4, first, sink)

    scores = rows @ k.repeat_interleave(H // G, 1).mT * 0.4
    if mask is not None:
        hidden = mask.logical_not() if mask.dtype == torch.bool else mask == -torch.inf
        scores = scores if mask.dtype == torch.bool else scores + mask.nan_to_num(neginf=0.0)
        scores = scores.masked_fill(hidden, -torch.inf)
    if causal:
        scores = scores.masked_fill(torch.ones(T, T).triu(1)[first:].bool(), -torch.inf)
    joined = torch.cat([scores, sink.view(1, H, 1, 1).expand(B, H, T - first, 1)], -1)
    wanted = joined.softmax(-1)[..., :-1] @ v.repeat_interleave(H // G, 1)
    assert (out - wanted).abs().max() < 1e-12
    grad = torch.randn_like(out)
    pair = (torch.autograd.grad(x, (q, k, v, sink), grad) for x in (out, wanted))
    for found, true in zip(*pair, strict=True):
        assert (found - true).abs().max() < 1e-12


def test_a_query_that_sees_its_sink_alone_yields_zeros() -> None:
    q, k, v = _inputs(D, torch.float32)
    sink = torch.zeros(H, requires_grad=True)
    seen = torch.ones(T, T, dtype=torch.bool)
    seen[2] = False
    out = attention(q, k, v, seen, False, 0.4, 0, sink)
    assert not out[:, :, 2].any()
    found = torch.autograd.grad(out.sum(), (q, k, v, sink))
    assert all(x.isfinite().all() for x in found)


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
