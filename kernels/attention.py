"""Scaled dot-product attention as one op, `merakc::attention`, and its backward as another.

Tracing sees the two ops and nothing inside them; the kernel is chosen where they run. On a CPU
that is torch's flash attention where its conditions hold, on CUDA whichever kernel
`F.scaled_dot_product_attention` picks, elsewhere the plain formulas.

Legend of shapes: b batch, h query heads, g key heads (h is a multiple of g), s query length,
t key length, d head dim of queries and keys, e head dim of values.

Layouts, the same for every kernel, because tracing turns them into view or reshape: `out` and the
three gradients lie in memory as [b, s, h, d] and are seen as [b, h, s, d]; `logsumexp` lies as
[b, s, h] and is seen as [b, h, s].
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_FLASH_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """softmax(scale * q k^T + mask) v, of shape [b, h, s, e].

    q [b, h, s, d], k [b, g, t, d], v [b, g, t, e]; query head i reads key head i // (h / g).
    `mask` broadcasts to [b, h, s, t]: booleans say who may be attended, floats are added; it gets
    no gradient. `causal` lets query i see keys 0..i, whatever s and t, and combines with a mask.
    `scale` is 1/sqrt(d) unless given. A query that sees no key yields zeros.
    """
    _check(q, k, v, mask)
    # Rounded as torch rounds it: d ** -0.5 may differ in the last bit.
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    out: Tensor = torch.ops.merakc.attention(q, k, v, mask, causal, scale)[0]
    return out


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
    """Refuses shapes and dtypes on which a kernel would be silently wrong."""
    assert q.dim() == k.dim() == v.dim() == 4, (q.shape, k.shape, v.shape)
    assert q.dtype == k.dtype == v.dtype, (q.dtype, k.dtype, v.dtype)
    assert q.shape[0] == k.shape[0], (q.shape, k.shape)
    assert q.shape[1] % k.shape[1] == 0, (q.shape, k.shape)
    assert q.shape[3] == k.shape[3], (q.shape, k.shape)
    assert k.shape[:3] == v.shape[:3], (k.shape, v.shape)
    if mask is not None:
        full = (*q.shape[:3], k.shape[2])
        assert mask.dim() <= 4, mask.shape
        for size, limit in zip(reversed(mask.shape), reversed(full), strict=False):
            assert size in (1, limit), f"mask {tuple(mask.shape)} does not broadcast to {full}"


# Layouts


def _empty_bshd(like: Tensor, heads: Tensor) -> Tensor:
    """Empty [b, h, s, d] of the shape of `heads` that lies in memory as [b, s, h, d]."""
    b, h, s, d = heads.shape
    return like.new_empty((b, s, h, d)).transpose(1, 2)


def _to_bshd(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Gives x [b, h, s, d] the layout that the ops promise, copied only if it has another."""
    b, h, s, d = x.shape
    if x.dtype == dtype and x.stride() == (s * h * d, d, h * d, 1):
        return x
    return x.new_empty((b, s, h, d), dtype=dtype).transpose(1, 2).copy_(x)


def _to_bsh(x: Tensor) -> Tensor:
    """Gives x [b, h, s] the layout that the ops promise, copied only if it has another."""
    b, h, s = x.shape
    if x.stride() == (s * h, 1, h):
        return x
    return x.new_empty((b, s, h)).transpose(1, 2).copy_(x)


def _rows(x: Tensor) -> Tensor:
    """Gives x unit stride in its last dim: the flash kernel reads it so without looking."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """In what precision scores are summed: that of float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _bias(
    mask: Tensor | None, causal: bool, s: int, t: int, dtype: torch.dtype
) -> tuple[Tensor | None, bool]:
    """The mask as floats to add, of four dims of full size or 1; and what is left of `causal`."""
    if mask is None:
        return None, causal
    mask = mask[(None,) * (4 - mask.dim())]
    for dim in range(4):
        if mask.stride(dim) == 0:  # an expanded mask need not be spelled out
            mask = mask.narrow(dim, 0, min(1, mask.shape[dim]))
    if causal:
        future = torch.ones((s, t), dtype=torch.bool, device=mask.device).triu_(1)
        mask = mask & ~future if mask.dtype == torch.bool else mask.masked_fill(future, -torch.inf)
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf), False
    return mask.to(dtype), False


# The formulas: FlashAttention-2 (arXiv 2307.08691, algorithms 1 and 2), in one block


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """The scores scale * q k^T + mask, [b, h, s, t]."""
    b, h, s, _ = q.shape
    t = k.shape[2]
    scores = (_grouped(q * scale, k) @ k.transpose(-1, -2)).view(b, h, s, t)
    bias, causal = _bias(mask, causal, s, t, scores.dtype)
    if bias is not None:
        scores = scores + bias
    if causal:
        future = torch.ones((s, t), dtype=torch.bool, device=q.device).triu_(1)
        scores = scores.masked_fill_(future, -torch.inf)
    return scores


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """Views x [b, h, s, .] as [b, g, h/g * s, .]: queries that share a key head, in one matrix."""
    b, h, s, d = x.shape
    g = k.shape[1]
    return x.reshape(b, g, h // g * s, d)


def _reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The formulas in plain ops; scores and sums of half precision are taken in float32."""
    b, h, s, _ = q.shape
    dtype = _lse_dtype(q.dtype)
    scores = _scores(q.to(dtype), k.to(dtype), mask, causal, scale)
    logsumexp = scores.logsumexp(-1)
    # A row without keys: any finite number makes its probabilities exp(-inf) = 0; flash writes 0.
    logsumexp.masked_fill_(logsumexp == -torch.inf, 0.0)
    probabilities = scores.sub_(logsumexp.unsqueeze(-1)).exp_()
    out = (_grouped(probabilities, k) @ v.to(dtype)).view(b, h, s, v.shape[3])
    return _to_bshd(out, q.dtype), _to_bsh(logsumexp)


def _reference_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities again from the scores and their logsumexp, then the chain rule."""
    given = q.dtype
    grad_out, q, k, v, out = (x.to(logsumexp.dtype) for x in (grad_out, q, k, v, out))
    scores = _scores(q, k, mask, causal, scale)
    probabilities = _grouped(scores.sub_(logsumexp.unsqueeze(-1)).exp_(), k)
    grad_rows = _grouped(grad_out, k)
    dv = probabilities.transpose(-1, -2) @ grad_rows
    # The sum over keys of p * dp, without that product: D in algorithm 2 of the paper.
    delta = _grouped((grad_out * out).sum(-1, keepdim=True), k)
    dscores = (grad_rows @ v.transpose(-1, -2)).sub_(delta).mul_(probabilities).mul_(scale)
    dq = (dscores @ k).view(q.shape)
    dk = dscores.transpose(-1, -2) @ _grouped(q, k)
    return _to_bshd(dq, given), _to_bshd(dk, given), _to_bshd(dv, given)


# CPU


def _flash_applies(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether torch's flash attention for CPUs takes these tensors (it handles grouped heads)."""
    same_head_dim = q.shape[-1] == k.shape[-1] == v.shape[-1]
    nonempty = q.numel() > 0 and k.numel() > 0
    return same_head_dim and nonempty and q.dtype in _FLASH_DTYPES


def _forward_cpu(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    if not _flash_applies(q, k, v):
        return _reference(q, k, v, mask, causal, scale)
    bias, causal = _bias(mask, causal, q.shape[2], k.shape[2], q.dtype)
    out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        _rows(q), _rows(k), _rows(v), 0.0, causal, attn_mask=bias, scale=scale
    )
    return _to_bshd(out, q.dtype), _to_bsh(logsumexp)


def _backward_cpu(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if not _flash_applies(q, k, v):
        return _reference_backward(grad_out, q, k, v, out, logsumexp, mask, causal, scale)
    bias, causal = _bias(mask, causal, q.shape[2], k.shape[2], q.dtype)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        _rows(grad_out),
        _rows(q),
        _rows(k),
        _rows(v),
        out,
        logsumexp,
        0.0,
        causal,
        attn_mask=bias,
        scale=scale,
    )
    return _to_bshd(dq, q.dtype), _to_bshd(dk, q.dtype), _to_bshd(dv, q.dtype)


# CUDA


def _forward_sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The kernel that torch chooses. It keeps the logsumexp to itself: ours is NaN, unread."""
    bias, causal = _bias(mask, causal, q.shape[2], k.shape[2], q.dtype)
    out = F.scaled_dot_product_attention(
        q, k, v, bias, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    b, h, s, _ = q.shape
    logsumexp = q.new_full((b, s, h), torch.nan, dtype=_lse_dtype(q.dtype)).transpose(1, 2)
    return _to_bshd(out, q.dtype), logsumexp


def _backward_sdpa(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs the forward again under autograd: which kernel it was, only that knows."""
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        again, _ = _forward_sdpa(q, k, v, mask, causal, scale)
        dq, dk, dv = torch.autograd.grad(again, (q, k, v), grad_out)
    return _to_bshd(dq, q.dtype), _to_bshd(dk, q.dtype), _to_bshd(dv, q.dtype)


# Past the dispatcher and autograd


def attention_now(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    """What `merakc::attention` computes."""
    if q.is_cpu:
        return _forward_cpu(q, *others)
    found: tuple[Tensor, Tensor] = torch.ops.merakc.attention(q, *others)
    return found


def attention_backward_now(grad_out: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What `merakc::attention_backward` computes."""
    if grad_out.is_cpu:
        return _backward_cpu(grad_out, *others)
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.merakc.attention_backward(grad_out, *others)
    return found


# Registration


def _fake(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    b, h, s, _ = q.shape
    out = q.new_empty((b, s, h, v.shape[3])).transpose(1, 2)
    return out, q.new_empty((b, s, h), dtype=_lse_dtype(q.dtype)).transpose(1, 2)


def _fake_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_bshd(q, q), _empty_bshd(q, k), _empty_bshd(q, v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, mask, *output)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, mask, out, logsumexp = ctx.saved_tensors
    grads = torch.ops.merakc.attention_backward(
        grad_out, q, k, v, out, logsumexp, mask, ctx.causal, ctx.scale
    )
    return *grads, None, None, None


torch.library.define(
    "merakc::attention",
    "(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float scale)"
    " -> (Tensor out, Tensor logsumexp)",
)
torch.library.define(
    "merakc::attention_backward",
    "(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, Tensor? mask,"
    " bool causal, float scale) -> (Tensor dq, Tensor dk, Tensor dv)",
)
torch.library.impl("merakc::attention", "default", _reference)
torch.library.impl("merakc::attention", "cpu", _forward_cpu)
torch.library.impl("merakc::attention", "cuda", _forward_sdpa)
torch.library.impl("merakc::attention_backward", "default", _reference_backward)
torch.library.impl("merakc::attention_backward", "cpu", _backward_cpu)
torch.library.impl("merakc::attention_backward", "cuda", _backward_sdpa)
torch.library.register_fake("merakc::attention", _fake)
torch.library.register_fake("merakc::attention_backward", _fake_backward)
torch.library.register_autograd("merakc::attention", _differentiate, setup_context=_save)
