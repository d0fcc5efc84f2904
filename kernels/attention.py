"""Scaled dot-product attention as one op, `merakc::attention`, and its backward as another.

Tracing sees the two ops and nothing inside them; the kernel is chosen where they run. On a CPU
that is torch's flash attention where its conditions hold, on CUDA whichever kernel
`F.scaled_dot_product_attention` picks, elsewhere the plain formulas.

Legend of shapes: b batch, h query heads, g key heads (h is a multiple of g), s query length,
t key length, d head dim of queries and keys, e head dim of values.

Graphs may say `within` what a mask lets rows see at most: (a, b), that row i sees none of the
columns but i - a..i + b. That changes nothing here; passes know by it what need not travel.

Layouts, the same for every kernel, because tracing turns them into view or reshape: `out` and the
three gradients lie in memory as [b, s, h, d] and are seen as [b, h, s, d]; `logsumexp` lies as
[b, s, h] and is seen as [b, h, s].
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from merakc.kernels import attention_cuda
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
from merakc.kernels.attention_rows import backward_of, forward_of, sink_gradient

_FLASH_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    start: int = 0,
    sink: Tensor | None = None,
) -> Tensor:
    """softmax(scale * q k^T + mask) v, of shape [b, h, s, e].

    q [b, h, s, d], k [b, g, t, d], v [b, g, t, e]; query head i reads key head i // (h / g).
    `mask` broadcasts to [b, h, s, t]: booleans say who may be attended, floats are added; it gets
    no gradient. `causal` lets query i see keys 0..start + i, whatever s and t, and combines with a
    mask: the first query is then row `start` of a sequence. `scale` is 1/sqrt(d) unless given. Each
    head of a `sink` [h] adds one score to all rows of the softmax, and nothing to what they attend
    to. A query that sees no key yields zeros.
    """
    _check(q, k, v, mask)
    assert sink is None or sink.shape == q.shape[1:2], (sink, q.shape)
    # Rounded as torch rounds it: d ** -0.5 may differ in the last bit.
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    out: Tensor = torch.ops.merakc.attention(q, k, v, mask, causal, scale, start, sink)[0]
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
        return reference(q, k, v, mask, causal, scale)
    bias, causal = bias_of(mask, causal, q.shape[2], k.shape[2], q.dtype)
    out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        rows(q), rows(k), rows(v), 0.0, causal, attn_mask=bias, scale=scale
    )
    return to_bshd(out, q.dtype), to_bsh(logsumexp)


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
        return reference_backward(grad_out, q, k, v, out, logsumexp, mask, causal, scale)
    bias, causal = bias_of(mask, causal, q.shape[2], k.shape[2], q.dtype)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        rows(grad_out),
        rows(q),
        rows(k),
        rows(v),
        out,
        logsumexp,
        0.0,
        causal,
        attn_mask=bias,
        scale=scale,
    )
    return to_bshd(dq, q.dtype), to_bshd(dk, q.dtype), to_bshd(dv, q.dtype)


FORWARD_CPU, BACKWARD_CPU = forward_of(_forward_cpu), backward_of(_backward_cpu)

# Past the dispatcher and autograd


def attention_now(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    """What `merakc::attention` computes."""
    if q.is_cpu:
        return FORWARD_CPU(q, *others)
    found: tuple[Tensor, Tensor] = torch.ops.merakc.attention(q, *others)
    return found


def attention_backward_now(grad_out: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What `merakc::attention_backward` computes."""
    if grad_out.is_cpu:
        return BACKWARD_CPU(grad_out, *others)
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.merakc.attention_backward(grad_out, *others)
    return found


# Registration


def fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """The shapes of a result and of its logsumexp, without values."""
    b, h, s = q.shape[:3]
    out = q.new_empty((b, s, h, v.shape[3])).transpose(1, 2)
    return out, q.new_empty((b, s, h), dtype=lse_dtype(q.dtype)).transpose(1, 2)


def fake_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The shapes of the gradients of queries, keys and values."""
    return empty_bshd(q, q), empty_bshd(q, k), empty_bshd(q, v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, ctx.causal, ctx.scale, ctx.start, sink, _ = inputs
    ctx.save_for_backward(q, k, v, mask, *output, sink)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, mask, out, logsumexp, sink = ctx.saved_tensors
    grads = torch.ops.merakc.attention_backward(
        grad_out, q, k, v, out, logsumexp, mask, ctx.causal, ctx.scale, ctx.start
    )
    own = None if sink is None else sink_gradient(grad_out, out, logsumexp, sink)
    return *grads, None, None, None, None, own, None


torch.library.define(
    "merakc::attention",
    "(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float scale, int start=0,"
    " Tensor? sink=None, int[] within=[]) -> (Tensor out, Tensor logsumexp)",
)
torch.library.define(
    "merakc::attention_backward",
    "(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, Tensor? mask,"
    " bool causal, float scale, int start=0) -> (Tensor dq, Tensor dk, Tensor dv)",
)
torch.library.impl("merakc::attention", "default", forward_of(reference))
torch.library.impl("merakc::attention", "cpu", FORWARD_CPU)
torch.library.impl("merakc::attention", "cuda", forward_of(attention_cuda.forward))
torch.library.impl("merakc::attention_backward", "default", backward_of(reference_backward))
torch.library.impl("merakc::attention_backward", "cpu", BACKWARD_CPU)
torch.library.impl("merakc::attention_backward", "cuda", backward_of(attention_cuda.backward))
torch.library.register_fake("merakc::attention", fake)
torch.library.register_fake("merakc::attention_backward", fake_backward)
torch.library.register_autograd("merakc::attention", _differentiate, setup_context=_save)
