"""`merakc::attention` on CUDA: torch's fused kernels, called past autograd.

Which kernel runs is what `F.scaled_dot_product_attention` would choose of the same tensors, so that
its switches (`torch.nn.attention.sdpa_kernel`) hold here too. The forward's logsumexp is kept, and
the backward is the kernel's own: nothing is computed twice, and no s x t matrix is kept.

Legend of shapes as in `merakc.kernels.attention`.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from merakc.kernels.attention_formulas import (
    bias_of,
    reference,
    reference_backward,
    to_bsh,
    to_bshd,
)

# Flash attention reads heads of a multiple of so many elements, the others masks of rows of one.
HEAD_DIMS, MASK_COLUMNS = 8, 16
ATEN: Any = torch.ops.aten
FLASH, EFFICIENT, CUDNN = (
    SDPBackend.FLASH_ATTENTION.value,
    SDPBackend.EFFICIENT_ATTENTION.value,
    SDPBackend.CUDNN_ATTENTION.value,
)


class _Call(NamedTuple):
    """What a kernel is given: keys and values for each query head where it takes no groups."""

    kernel: int
    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    causal: bool


def _call(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> _Call | None:
    """What torch would run; None where that is its plain formulas."""
    bias, causal = bias_of(mask, causal, q.shape[2], k.shape[2], q.dtype)
    if not q.numel() or not k.numel():
        return None
    grouped = q.shape[1] != k.shape[1]
    kernel = _choice(q, k, v, bias, causal, scale)
    if kernel not in (FLASH, EFFICIENT, CUDNN) and grouped:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        kernel = _choice(q, k, v, bias, causal, scale)
    if kernel not in (FLASH, EFFICIENT, CUDNN):
        return None
    return _Call(kernel, q, k, v, _aligned(bias, q, k), causal)


def _choice(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> int:
    if bias is not None:
        bias = bias.expand(*q.shape[:3], k.shape[2])
    found: int = torch._fused_sdp_choice(
        q, k, v, bias, 0.0, causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return found


def _aligned(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The bias, with each row where the kernels can read it."""
    if bias is None:
        return None
    columns = k.shape[2]
    if bias.shape[3] != columns:
        bias = bias.expand(*bias.shape[:3], columns)
    if more := -columns % MASK_COLUMNS:
        bias = F.pad(bias, (0, more))[..., :columns]
    return bias.expand(*q.shape[:3], columns)


def _wide(x: Tensor, more: int) -> Tensor:
    return F.pad(x, (0, more)) if more else x


@cache
def _no_seed(device: torch.device) -> Tensor:
    """What kernels that drop nothing take for the state of their draws."""
    return torch.zeros(2, dtype=torch.uint64, device=device)


@cache
def _no_draws(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=device)


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The output and the logsumexp."""
    call = _call(q, k, v, mask, causal, scale)
    if call is None:
        return reference(q, k, v, mask, causal, scale)
    kernel, q, k, v, bias, causal = call
    if kernel == FLASH:
        more = -q.shape[3] % HEAD_DIMS
        out, logsumexp, *_ = ATEN._scaled_dot_product_flash_attention(
            _wide(q, more), _wide(k, more), _wide(v, more), 0.0, causal, scale=scale
        )
        out = out[..., : v.shape[3]]
    elif kernel == CUDNN:
        out, logsumexp, *_ = ATEN._scaled_dot_product_cudnn_attention(
            q, k, v, bias, True, 0.0, causal, scale=scale
        )
        logsumexp = logsumexp.view(q.shape[:3])
    else:
        out, logsumexp, *_ = ATEN._scaled_dot_product_efficient_attention(
            q, k, v, bias, True, 0.0, causal, scale=scale
        )
        logsumexp = logsumexp[..., : q.shape[2]]
    if bias is not None:  # a query that sees no key: each probability, exp(x - inf), is 0
        logsumexp = logsumexp.nan_to_num(nan=torch.inf, neginf=torch.inf)
    return to_bshd(out, q.dtype), to_bsh(logsumexp)


def backward(
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
    """The gradients of q, k and v."""
    call = _call(q, k, v, mask, causal, scale)
    if call is None:
        return reference_backward(grad_out, q, k, v, out, logsumexp, mask, causal, scale)
    groups = k.shape[1]
    kernel, q, k, v, bias, causal = call
    s, t, dims = q.shape[2], k.shape[2], (q.shape[3], k.shape[3], v.shape[3])
    if kernel == FLASH:
        more, seed = -q.shape[3] % HEAD_DIMS, _no_seed(q.device)
        wide = (_wide(x, more) for x in (grad_out, q, k, v, out))
        found = ATEN._scaled_dot_product_flash_attention_backward(
            *wide, logsumexp.contiguous(), None, None, s, t, 0.0, causal, seed, seed, scale=scale
        )
    elif kernel == CUDNN:
        draws = _no_draws(q.device)
        found = ATEN._scaled_dot_product_cudnn_attention_backward(
            grad_out, q, k, v, out, logsumexp.contiguous().unsqueeze(-1), draws, draws, bias,
            None, None, s, t, 0.0, causal, scale=scale,
        )  # fmt: skip
    else:
        draws = _no_draws(q.device)
        found = ATEN._scaled_dot_product_efficient_attention_backward(
            grad_out, q, k, v, bias, out, _rows_of_32(logsumexp), draws, draws, 0.0,
            [True, True, True, False], causal, scale=scale,
        )  # fmt: skip
    dq, dk, dv = (x[..., :d] for x, d in zip(found[:3], dims, strict=True))
    if dk.shape[1] != groups:
        dk, dv = (x.unflatten(1, (groups, -1)).sum(2) for x in (dk, dv))
    return to_bshd(dq, q.dtype), to_bshd(dk, q.dtype), to_bshd(dv, q.dtype)


def _rows_of_32(logsumexp: Tensor) -> Tensor:
    """The logsumexp as the memory-efficient kernel lays it out."""
    return F.pad(logsumexp, (0, -logsumexp.shape[2] % 32), value=torch.inf).contiguous()
