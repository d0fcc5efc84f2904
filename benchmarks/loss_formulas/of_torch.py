"""The losses that torch has, with their reductions, weights and targets."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.loss_formulas.formula import STEPS, Named, formulas


def _class_weight(z: Tensor) -> Tensor:
    return torch.linspace(0.5, 2.0, z.shape[1], dtype=z.dtype)


def _ctc(h: Tensor, b: Named, reduction: str) -> Tensor:
    lengths = torch.full((h.shape[0],), STEPS)
    targets = b.ids[:, :2].clamp(min=1)
    scores = h.log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(
        scores, targets, lengths, (b.valid.sum(1) / 3).long(), reduction=reduction,
        zero_infinity=True,
    )  # fmt: skip


ROWS = formulas("torch", {
    "ce": lambda z, b, p: F.cross_entropy(z, b.y),
    "ce_sum": lambda z, b, p: F.cross_entropy(z, b.y, reduction="sum"),
    "ce_none_mean": lambda z, b, p: F.cross_entropy(z, b.y, reduction="none").mean(),
    "ce_none_sum": lambda z, b, p: F.cross_entropy(z, b.y, reduction="none").sum(),
    "ce_ignore_2": lambda z, b, p: F.cross_entropy(z, b.c, ignore_index=2),
    "ce_class_weight": lambda z, b, p: F.cross_entropy(z, b.y, weight=_class_weight(z)),
    "ce_class_weight_sum": lambda z, b, p: F.cross_entropy(
        z, b.y, weight=_class_weight(z), reduction="sum"),
    "ce_smooth": lambda z, b, p: F.cross_entropy(z, b.y, label_smoothing=0.1),
    "ce_smooth_class_weight": lambda z, b, p: F.cross_entropy(
        z, b.y, weight=_class_weight(z), label_smoothing=0.1),
    "ce_prob": lambda z, b, p: F.cross_entropy(z, b.prob),
    "ce_prob_class_weight": lambda z, b, p: F.cross_entropy(z, b.prob, weight=_class_weight(z)),
    "ce_prob_smooth": lambda z, b, p: F.cross_entropy(z, b.prob, label_smoothing=0.2),
    "nll": lambda z, b, p: F.nll_loss(z.log_softmax(1), b.y),
    "nll_sum": lambda z, b, p: F.nll_loss(z.log_softmax(1), b.y, reduction="sum"),
    "nll_class_weight": lambda z, b, p: F.nll_loss(
        z.log_softmax(1), b.y, weight=_class_weight(z)),
    "mse": lambda z, b, p: F.mse_loss(z, b.target),
    "mse_sum": lambda z, b, p: F.mse_loss(z, b.target, reduction="sum"),
    "mse_none_mean": lambda z, b, p: F.mse_loss(z, b.target, reduction="none").mean(),
    "mse_sample_weight": lambda z, b, p: F.mse_loss(z, b.target, weight=b.bits),
    "l1": lambda z, b, p: F.l1_loss(z, b.target),
    "huber": lambda z, b, p: F.huber_loss(z, b.target, delta=0.5),
    "smooth_l1": lambda z, b, p: F.smooth_l1_loss(z, b.target, beta=0.3),
    "smooth_l1_sum": lambda z, b, p: F.smooth_l1_loss(z, b.target, reduction="sum"),
    "kl_batchmean": lambda z, b, p: F.kl_div(z.log_softmax(1), b.prob, reduction="batchmean"),
    "kl_mean": lambda z, b, p: F.kl_div(z.log_softmax(1), b.prob),
    "kl_sum": lambda z, b, p: F.kl_div(z.log_softmax(1), b.prob, reduction="sum"),
    "kl_log_target": lambda z, b, p: F.kl_div(
        z.log_softmax(1), b.prob.log(), reduction="batchmean", log_target=True),
    "bce": lambda z, b, p: F.binary_cross_entropy(z.sigmoid(), b.bits),
    "bce_sum": lambda z, b, p: F.binary_cross_entropy(z.sigmoid(), b.bits, reduction="sum"),
    "bce_weight": lambda z, b, p: F.binary_cross_entropy(
        z.sigmoid(), b.bits, weight=b.weight[:, None].expand_as(z)),
    "bce_logits": lambda z, b, p: F.binary_cross_entropy_with_logits(z, b.bits),
    "bce_logits_pos_weight": lambda z, b, p: F.binary_cross_entropy_with_logits(
        z, b.bits, pos_weight=_class_weight(z)),
    "bce_logits_sample_weight": lambda z, b, p: F.binary_cross_entropy_with_logits(
        z, b.bits, weight=b.weight[:, None]),
    "gaussian_nll": lambda z, b, p: F.gaussian_nll_loss(z[:, :3], b.target[:, :3], z[:, 3:].exp()),
    "gaussian_nll_sum": lambda z, b, p: F.gaussian_nll_loss(
        z[:, :3], b.target[:, :3], z[:, 3:].exp(), full=True, reduction="sum"),
    "poisson_nll": lambda z, b, p: F.poisson_nll_loss(z, b.c[:, None].double().expand_as(z)),
    "poisson_nll_full": lambda z, b, p: F.poisson_nll_loss(
        z.exp(), b.c[:, None].double().expand_as(z), log_input=False, full=True),
    "soft_margin": lambda z, b, p: F.soft_margin_loss(z, 2 * b.bits - 1),
    "margin_ranking": lambda z, b, p: F.margin_ranking_loss(z[:, 0], z[:, 1], b.sign, margin=0.3),
    "hinge_embedding": lambda z, b, p: F.hinge_embedding_loss(z.pow(2).sum(1), b.sign),
    "cosine_embedding": lambda z, b, p: F.cosine_embedding_loss(z, b.target, b.sign, margin=0.1),
    "triplet": lambda z, b, p: F.triplet_margin_loss(z, b.target, z @ p.mix),
    "triplet_swap_sum": lambda z, b, p: F.triplet_margin_loss(
        z, b.target, z @ p.mix, swap=True, reduction="sum"),
    "triplet_distance": lambda z, b, p: F.triplet_margin_with_distance_loss(
        z, b.target, z @ p.mix, distance_function=lambda a, o: 1 - F.cosine_similarity(a, o)),
    "multi_margin": lambda z, b, p: F.multi_margin_loss(z, b.c),
    "multi_margin_class_weight": lambda z, b, p: F.multi_margin_loss(
        z, b.c, p=2, weight=_class_weight(z)),
    "multilabel_margin": lambda z, b, p: F.multilabel_margin_loss(z, b.multi),
    "multilabel_soft_margin": lambda z, b, p: F.multilabel_soft_margin_loss(z, b.bits),
    "multilabel_soft_margin_weight": lambda z, b, p: F.multilabel_soft_margin_loss(
        z, b.bits, weight=_class_weight(z)),
})  # fmt: skip

TOKENS = formulas("torch", {
    "ce_steps": lambda h, b, p: F.cross_entropy(h.transpose(1, 2), b.labels),
    "ce_flat": lambda h, b, p: F.cross_entropy(h.flatten(0, 1), b.labels.flatten()),
    "ce_shifted": lambda h, b, p: F.cross_entropy(
        h[:, :-1].reshape(-1, h.shape[2]), b.labels[:, 1:].reshape(-1)),
    "ce_flat_sum": lambda h, b, p: F.cross_entropy(
        h.flatten(0, 1), b.labels.flatten(), reduction="sum"),
    "ce_steps_smooth": lambda h, b, p: F.cross_entropy(
        h.transpose(1, 2), b.labels, label_smoothing=0.1),
    "nll2d": lambda h, b, p: F.nll_loss(
        h.log_softmax(-1).transpose(1, 2).contiguous()[..., None], b.labels[..., None]),
    "ctc": lambda h, b, p: _ctc(h, b, "mean"),
    "ctc_sum": lambda h, b, p: _ctc(h, b, "sum"),
}, tokens=True)  # fmt: skip

FORMULAS = (*ROWS, *TOKENS)
