"""Causal attention of some rows alone: query i sees keys 0..start + i.

So it is where a sequence is split over ranks. All queries see the keys before `start`, and those
from there on as in any causal attention: two calls of a kernel, whose results are merged by their
logsumexp (Milakov and Gimelshein, arXiv 1805.02867). The backward of each takes the merged results,
as in ring attention (Liu et al., arXiv 2310.01889).

A head may have a sink, as of a key of value zero that every query sees (Xiao et al., arXiv
2309.17453). That scales the result by what is left of the probabilities, and the backward of a
kernel is right by itself when it is given the scaled result and the logsumexp with the sink.

Legend of shapes as in `merakc.kernels.attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from merakc.kernels.attention_formulas import to_bsh, to_bshd

Forward = Callable[..., tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]


class _Block(NamedTuple):
    """Keys that queries see together, with their values, and whether each sees one more."""

    k: Tensor
    v: Tensor
    mask: Tensor | None
    causal: bool


def forward_of(kernel: Forward) -> Forward:
    """The forward from any row on, and with sinks, of a kernel that begins at the first."""

    def forward(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float,
        start: int = 0, sink: Tensor | None = None, within: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if sink is not None:
            return with_sink(*forward(q, k, v, mask, causal, scale, start), sink)
        if not start or not causal:
            return kernel(q, k, v, mask, causal, scale)
        parts = [kernel(q, *block, scale) for block in _blocks(q, k, v, mask, start)]
        if len(parts) == 1:
            return parts[0]
        logsumexp = torch.logaddexp(parts[0][1], parts[1][1])
        out = sum(o * (own - logsumexp).exp_().unsqueeze(-1) for o, own in parts)
        assert isinstance(out, Tensor)
        return to_bshd(out, q.dtype), to_bsh(logsumexp)

    return forward


def backward_of(kernel: Backward) -> Backward:
    """The backward from any row on, of a kernel that begins at the first."""

    def backward(
        grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor,
        mask: Tensor | None, causal: bool, scale: float, start: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        if not start or not causal:
            return kernel(grad_out, q, k, v, out, logsumexp, mask, causal, scale)
        blocks = _blocks(q, k, v, mask, start)
        parts = [kernel(grad_out, q, b.k, b.v, out, logsumexp, *b[2:], scale) for b in blocks]
        dq = parts[0][0] if len(parts) == 1 else parts[0][0] + parts[1][0]
        dk, dv = (_joined([p[n] for p in parts], whole) for n, whole in ((1, k), (2, v)))
        return to_bshd(dq, q.dtype), to_bshd(dk, k.dtype), to_bshd(dv, v.dtype)

    return backward


def with_sink(out: Tensor, logsumexp: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """What is left of results, with one more score to each row's softmax; and its logsumexp."""
    own = sink.to(logsumexp.dtype).unsqueeze(-1)  # [h, 1]
    left = torch.sigmoid(logsumexp - own).unsqueeze(-1)
    return to_bshd(out * left, out.dtype), to_bsh(torch.logaddexp(logsumexp, own))


def sink_gradient(grad_out: Tensor, out: Tensor, logsumexp: Tensor, sink: Tensor) -> Tensor:
    """The gradient of the sinks [h], by what the forward returned."""
    grad_out, out = grad_out.to(logsumexp.dtype), out.to(logsumexp.dtype)
    own = (sink.to(logsumexp.dtype).unsqueeze(-1) - logsumexp).exp()  # of all probabilities
    return -(own * (grad_out * out).sum(-1)).sum((0, 2)).to(sink.dtype)


def _blocks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, start: int) -> list[_Block]:
    """The keys that any of the queries sees: those before them all, and those beside them.

    One block with a mask, which could hide all keys of another from a query.
    """
    before, end = (min(n, k.shape[2]) for n in (start, start + q.shape[2]))
    if mask is not None:
        mask = mask if mask.shape[-1] == 1 else mask[..., :end]
        rows = torch.arange(start, start + q.shape[2], device=q.device)
        seen = torch.arange(end, device=q.device) <= rows.unsqueeze(-1)
        mask = mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -torch.inf)
        return [_Block(k[:, :, :end], v[:, :, :end], mask, False)]
    found = [_Block(k[:, :, :before], v[:, :, :before], None, False)]
    if end > before:
        found.append(_Block(k[:, :, before:end], v[:, :, before:end], None, True))
    return found


def _joined(parts: list[Tensor], whole: Tensor) -> Tensor:
    """The gradient of all keys or values: of those that no query sees it is zero."""
    b, h, t, d = whole.shape
    found = parts[0].new_zeros((b, t, h, d)).transpose(1, 2)
    torch.cat(parts, 2, out=found[:, :, : sum(p.shape[2] for p in parts)])
    return found
