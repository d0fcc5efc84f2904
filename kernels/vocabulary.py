"""Embedding and cross-entropy of a vocabulary that is split over the ranks of a mesh axis.

After Megatron-LM (arXiv 1909.08053, section 3). Plain Python over torch ops and the collectives:
tracing sees their parts, and differentiates them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from merakc.kernels.collectives import all_reduce

_NONE, _MEAN, _SUM = 0, 1, 2  # at::Reduction


def vocab_parallel_embedding(
    weight: Tensor, ids: Tensor, start: int, padding_idx: int = -1, axis: str = "tp"
) -> Tensor:
    """`F.embedding` of integer `ids` [...] into a full table [vocab, h], giving [..., h].

    `weight` [rows, h] holds rows start..start+rows of it. Row `padding_idx` of the full table gets
    no gradient; -1 is none, as in aten.
    """
    rows = weight.shape[0]
    local = ids - start
    elsewhere = (local < 0) | (local >= rows)
    local_padding = padding_idx - start if start <= padding_idx < start + rows else -1
    out = torch.embedding(weight, local.masked_fill(elsewhere, 0), padding_idx=local_padding)
    return all_reduce(out.masked_fill(elsewhere.unsqueeze(-1), 0.0), axis)


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    start: int,
    vocab: int,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    axis: str = "tp",
) -> Tensor:
    """`F.cross_entropy` of full logits [n, vocab] or [vocab] with integer `target` [n] or [].

    `logits` [n, local] or [local] are columns start..start+local of the full ones. `reduction` is
    aten's: 0 none, 1 mean over the targets other than `ignore_index`, 2 sum. Logits of half
    precision are reduced in float32; the loss has their dtype. Two all-reduces of O(n).
    """
    columns = logits.shape[-1]
    assert 0 <= start <= vocab - columns, (start, columns, vocab)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    scores = logits.to(dtype)
    shifted = scores - all_reduce(scores.detach().amax(-1), axis, "max").unsqueeze(-1)

    target = target.long()  # narrow ones would wrap below
    ignored = target == ignore_index
    local = target - start
    elsewhere = (local < 0) | (local >= columns) | ignored
    picked = shifted.gather(-1, local.masked_fill(elsewhere, 0).unsqueeze(-1)).squeeze(-1)
    sums = [shifted.exp().sum(-1), picked.masked_fill(elsewhere, 0.0)]
    if label_smoothing > 0.0:
        sums.append(shifted.sum(-1))
    totals = all_reduce(torch.stack(sums), axis)

    log_normaliser = totals[0].log()
    loss = log_normaliser - totals[1]
    if label_smoothing > 0.0:
        # Szegedy et al. (arXiv 1512.00567, section 7): a share of every class's -log p, on average
        smooth = log_normaliser - totals[2] / vocab
        loss = (1.0 - label_smoothing) * loss + label_smoothing * smooth
    loss = loss.masked_fill(ignored, 0.0)
    return _reduced(loss, ignored, reduction).to(logits.dtype)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    reduction: int,
    ignore_index: int,
    vocab: int,
    start: int = 0,
    axis: str = "",
) -> Tensor:
    """`F.cross_entropy` of the scores of rows x [n, h] with weight [classes, h] and maybe a bias
    [classes], which are never whole (`merakc.kernels.scores`); in the dtype of their sums.

    Classes are start..start+classes of `vocab`, the others those of the other ranks of an `axis`:
    then there are two all-reduces of O(n).
    """
    target = target.long()
    total, picked = torch.ops.merakc.scores(
        x, weight, bias, target, start, vocab, ignore_index, False
    )
    if axis:
        top = all_reduce(total.detach(), axis, "max")
        sums = all_reduce(torch.stack([(total - top).exp(), picked]), axis)
        total, picked = sums[0].log() + top, sums[1]
    ignored = target == ignore_index
    return _reduced((total - picked).masked_fill(ignored, 0.0), ignored, reduction)


def _reduced(losses: Tensor, ignored: Tensor, reduction: int) -> Tensor:
    """The losses of rows, with zeros for ignored ones, by aten's number of a reduction."""
    if reduction == _MEAN:
        return losses.sum() / ignored.logical_not().sum()
    assert reduction in (_NONE, _SUM), reduction
    return losses.sum() if reduction == _SUM else losses
