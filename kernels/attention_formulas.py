"""The formulas of attention in plain ops, and the layouts that every kernel keeps.

Legend of shapes as in `merakc.kernels.attention`.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Layouts


def empty_bshd(like: Tensor, heads: Tensor) -> Tensor:
    """Empty [b, h, s, d] of the shape of `heads` that lies in memory as [b, s, h, d]."""
    b, h, s, d = heads.shape
    return like.new_empty((b, s, h, d)).transpose(1, 2)


def to_bshd(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Gives x [b, h, s, d] the layout that the ops promise, copied only if it has another."""
    b, h, s, d = x.shape
    if x.dtype == dtype and x.stride() == (s * h * d, d, h * d, 1):
        return x
    return x.new_empty((b, s, h, d), dtype=dtype).transpose(1, 2).copy_(x)


def to_bsh(x: Tensor) -> Tensor:
    """Gives x [b, h, s] the layout that the ops promise, copied only if it has another."""
    b, h, s = x.shape
    if x.stride() == (s * h, 1, h):
        return x
    return x.new_empty((b, s, h)).transpose(1, 2).copy_(x)


def rows(x: Tensor) -> Tensor:
    """Gives x unit stride in its last dim: the flash kernel reads it so without looking."""
    return x if x.stride(-1) == 1 else x.contiguous()


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """In what precision scores are summed: that of float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def bias_of(
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
    bias, causal = bias_of(mask, causal, s, t, scores.dtype)
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


def reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The formulas in plain ops; scores and sums of half precision are taken in float32."""
    b, h, s, _ = q.shape
    dtype = lse_dtype(q.dtype)
    scores = _scores(q.to(dtype), k.to(dtype), mask, causal, scale)
    logsumexp = scores.logsumexp(-1)
    # A row without keys: any finite number makes its probabilities exp(-inf) = 0; flash writes 0.
    logsumexp.masked_fill_(logsumexp == -torch.inf, 0.0)
    probabilities = scores.sub_(logsumexp.unsqueeze(-1)).exp_()
    out = (_grouped(probabilities, k) @ v.to(dtype)).view(b, h, s, v.shape[3])
    return to_bshd(out, q.dtype), to_bsh(logsumexp)


def reference_backward(
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
    return to_bshd(dq, given), to_bshd(dk, given), to_bshd(dv, given)
