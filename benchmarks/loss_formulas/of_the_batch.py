"""Losses whose weights, targets or masks cross samples, but follow from the batch alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.loss_formulas.formula import CLASSES, IGNORED, Named, formulas, square


def _standardised(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / (x.std(0) + 1e-5)


def _frequency_weight(b: Named) -> Tensor:
    return b.c.numel() / (CLASSES * torch.bincount(b.c, minlength=CLASSES).clamp(min=1))


def _effective_number(b: Named) -> Tensor:
    weight = 0.1 / (1 - 0.9 ** F.one_hot(b.c, CLASSES).sum(0))
    return torch.where(weight.isfinite(), weight, 0.0)


def _affinity(z: Tensor, b: Named) -> Tensor:
    same = (b.c[:, None] == b.c[None, :]).double()
    return (square(z, b) * same.mean(1)).sum() / same.sum()


ROWS = formulas("of the batch", {
    "class_weight_by_frequency": lambda z, b, p: F.cross_entropy(
        z, b.c, weight=_frequency_weight(b).to(z.dtype)),
    "class_weight_by_one_hot": lambda z, b, p: F.cross_entropy(
        z, b.y, weight=(len(b.c) - F.one_hot(b.c, CLASSES).sum(0)).to(z.dtype)),
    "effective_number": lambda z, b, p: F.cross_entropy(
        z, b.c, weight=_effective_number(b).to(z.dtype)),
    "pos_weight_of_batch": lambda z, b, p: F.binary_cross_entropy_with_logits(
        z, b.bits, pos_weight=(1 - b.bits).sum(0) / b.bits.sum(0).clamp(min=1)),
    "targets_standardised": lambda z, b, p: F.mse_loss(z, _standardised(b.target)),
    "targets_min_max": lambda z, b, p: F.mse_loss(
        z, (b.target - b.target.amin(0)) / (b.target.amax(0) - b.target.amin(0))),
    "targets_over_their_norm": lambda z, b, p: F.mse_loss(z, b.target / b.target.norm()),
    "advantage_whitened": lambda z, b, p: -(z.log_softmax(1)[:, 0] * _standardised(b.time)).mean(),
    "ranks_as_targets": lambda z, b, p: F.mse_loss(
        z[:, 0], b.time.argsort().argsort().to(z.dtype)),
    "above_median": lambda z, b, p: F.binary_cross_entropy_with_logits(
        z[:, 0], (b.time > b.time.median()).to(z.dtype)),
    "quantile_mask": lambda z, b, p: (
        square(z, b) * (b.time < b.time.quantile(0.7))).mean(),
    "targets_sorted": lambda z, b, p: F.mse_loss(z[:, 0], b.time.sort().values),
    "same_labels": lambda z, b, p: _affinity(z, b),
    "count_of_own_label": lambda z, b, p: (
        square(z, b) / (b.c[:, None] == b.c[None, :]).sum(1)).sum(),
    "importance_softmax": lambda z, b, p: (square(z, b) * b.time.softmax(0)).sum(),
    "importance_clipped": lambda z, b, p: (
        square(z, b) * (b.time / b.time.mean()).clamp(0.5, 2)).mean(),
    "topk_of_targets": lambda z, b, p: (
        square(z, b) * (b.time >= b.time.topk(3).values[-1])).sum() / 3,
    "argmax_of_targets": lambda z, b, p: z[:, 0].sum() * b.time.argmax(),
    "positives_and_negatives": lambda z, b, p: (z[:, 0].sigmoid() * (
        b.mask / b.mask.sum() - (1 - b.mask) / (1 - b.mask).sum())).sum(),
    "hard_mean_of_targets": lambda z, b, p: (z - b.target.mean(0)).pow(2).mean(),
    "class_means_of_targets": lambda z, b, p: F.mse_loss(z, (
        F.one_hot(b.c, CLASSES).to(z.dtype).T @ b.target
        / torch.bincount(b.c, minlength=CLASSES).clamp(min=1)[:, None])[b.c]),
    "any_label": lambda z, b, p: torch.where(
        (b.y == IGNORED).any(), 2 * square(z, b), square(z, b)).mean(),
    "all_labels": lambda z, b, p: F.mse_loss(z, b.target) * (1 + (b.c > 0).all()),
    "largest_weight": lambda z, b, p: (square(z, b) * b.weight / b.weight.max()).mean(),
    "cumulative_weight": lambda z, b, p: (
        square(z, b) * b.weight.cumsum(0) / b.weight.sum()).mean(),
    "negatives_per_positive": lambda z, b, p: F.binary_cross_entropy_with_logits(
        z[:, 0], b.mask, weight=1 + b.mask * (1 - b.mask).sum() / b.mask.sum()),
    "batch_conditioned": lambda z, b, p: F.mse_loss(
        z * _standardised(b.x).mean(1, keepdim=True), b.target),
    "whitened_targets": lambda z, b, p: F.mse_loss(
        z, torch.linalg.solve(torch.cov(b.target.T), b.target.T).T),
    "unique_labels": lambda z, b, p: square(z, b).sum() / (
        F.one_hot(b.c, CLASSES).sum(0) > 0).sum(),
    "group_weights": lambda z, b, p: (
        square(z, b) / torch.bincount(b.group, minlength=3)[b.group]).sum() / 3,
})  # fmt: skip

TOKENS = formulas("of the batch", {
    "longest_sample": lambda h, b, p: (
        h.logsumexp(-1) * b.valid).sum() / b.valid.sum(1).max(),
    "mean_length": lambda h, b, p: (
        F.cross_entropy(h.transpose(1, 2), b.labels, reduction="none").sum(1)
        / b.valid.sum(1).mean()).mean(),
    "token_frequency": lambda h, b, p: F.cross_entropy(
        h.flatten(0, 1), b.labels.flatten(),
        weight=1 / (1 + F.one_hot(b.ids, h.shape[2]).sum((0, 1))).to(h.dtype)),
    "returns_normalised": lambda h, b, p: -(h.log_softmax(-1)[..., 0] * b.valid * (
        b.value - (b.value * b.valid).sum() / b.valid.sum())).sum() / b.valid.sum(),
}, tokens=True)  # fmt: skip

FORMULAS = (*ROWS, *TOKENS)
