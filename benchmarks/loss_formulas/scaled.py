"""Sums over samples that are scaled by hand: by counts, sizes, weights and other terms."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.loss_formulas.formula import IGNORED, Named, formulas, square


def _each(z: Tensor, b: Named) -> Tensor:
    return F.cross_entropy(z, b.y, reduction="none")


def _tokens(h: Tensor, b: Named) -> Tensor:
    return F.cross_entropy(h.transpose(1, 2), b.labels, reduction="none")


def _count(b: Named) -> Tensor:
    return (b.y != IGNORED).sum()


def _elbo(z: Tensor, b: Named) -> Tensor:
    mean, log_var = z[:, :3], z[:, 3:]
    divergence = -0.5 * (1 + log_var - mean.pow(2) - log_var.exp()).sum()
    return (F.mse_loss(mean, b.target[:, :3], reduction="sum") + divergence) / z.size(0)


def _focal(z: Tensor, b: Named) -> Tensor:
    each = _each(z, b)
    return ((1 - (-each).exp()) ** 2 * each).sum() / _count(b)


def _smooth_by_hand(z: Tensor, b: Named) -> Tensor:
    scores, valid = z.log_softmax(1), b.y != IGNORED
    hit = scores.gather(1, b.y.clamp(min=0)[:, None]).squeeze(1)
    each = 0.9 * hit + 0.1 * scores.mean(1)
    return -(each * valid).sum() / valid.sum()


def _distilled(z: Tensor, b: Named) -> Tensor:
    t = 2.0
    soft = F.kl_div((z / t).log_softmax(1), (b.target / t).softmax(1), reduction="batchmean")
    return 0.7 * soft * t**2 + 0.3 * F.cross_entropy(z, b.y)


def _uncertain(z: Tensor, b: Named, p: Named) -> Tensor:
    one, other = F.cross_entropy(z, b.y), F.mse_loss(z, b.target)
    return (-p.s[0]).exp() * one + (-p.s[1]).exp() * other + p.s.sum()


def _terms(z: Tensor, b: Named) -> list[Tensor]:
    return [F.cross_entropy(z, b.y), F.mse_loss(z, b.target)]


def _sample_means(h: Tensor, b: Named) -> Tensor:
    counts = b.valid.sum(1)
    means = (_tokens(h, b) * b.valid).sum(1) / counts.clamp(min=1)
    return means.sum() / (counts > 0).sum()


ROWS = formulas("scaled by hand", {
    "sum_by_n": lambda z, b, p: square(z, b).sum() / z.shape[0],
    "sum_times_1_by_n": lambda z, b, p: square(z, b).sum() * (1 / len(z)),
    "sum_by_sqrt_n": lambda z, b, p: square(z, b).sum() / math.sqrt(z.size(0)),
    "sum_by_numel": lambda z, b, p: square(z, b).sum() / z.numel(),
    "elbo": lambda z, b, p: _elbo(z, b),
    "sum_by_count": lambda z, b, p: _each(z, b).sum() / _count(b),
    "sum_by_count_clamped": lambda z, b, p: _each(z, b).sum() / _count(b).clamp(min=1),
    "sum_by_count_max": lambda z, b, p: _each(z, b).sum() / torch.maximum(
        _count(b), torch.ones((), dtype=torch.int64)),
    "sum_by_count_where": lambda z, b, p: _each(z, b).sum() / torch.where(
        _count(b) > 0, _count(b), torch.ones_like(_count(b))),
    "sum_by_count_eps": lambda z, b, p: _each(z, b).sum() / (_count(b) + 1e-6),
    "sum_times_reciprocal": lambda z, b, p: (square(z, b) * b.mask).sum()
    * b.mask.sum().reciprocal(),
    "mean_by_mean": lambda z, b, p: (square(z, b) * b.mask).mean() / b.mask.mean(),
    "masked_by_count_and_width": lambda z, b, p: (
        (z - b.target).pow(2) * b.mask[:, None]).sum() / (b.mask.sum() * z.shape[1]),
    "weights_normalised_first": lambda z, b, p: (square(z, b) * (b.mask / b.mask.sum())).sum(),
    "weighted_mean": lambda z, b, p: (square(z, b) * b.weight).sum() / b.weight.sum(),
    "weights_dot": lambda z, b, p: torch.dot(square(z, b), b.weight / b.weight.mean()),
    "two_sums_one_count": lambda z, b, p: (
        (square(z, b) * b.mask).sum() + (z.abs().sum(1) * b.mask).sum()) / b.mask.sum(),
    "exp_of_loss": lambda z, b, p: F.cross_entropy(z, b.y).exp(),
    "log_of_loss": lambda z, b, p: F.mse_loss(z, b.target).log(),
    "root_of_loss": lambda z, b, p: F.mse_loss(z, b.target).sqrt(),
    "loss_to_the_power_1": lambda z, b, p: F.cross_entropy(z, b.y) ** 1,
    "loss_squared": lambda z, b, p: F.cross_entropy(z, b.y) ** 2,
    "where_finite": lambda z, b, p: (lambda loss: torch.where(
        loss.isfinite(), loss, torch.zeros_like(loss)))(F.cross_entropy(z, b.y)),
    "nan_to_num": lambda z, b, p: F.cross_entropy(z, b.y).nan_to_num(),
    "clamped_loss": lambda z, b, p: F.cross_entropy(z, b.y).clamp(max=1e3),
    "mean_of_scalar": lambda z, b, p: F.cross_entropy(z, b.y).mean(),
    "sum_of_scalar": lambda z, b, p: F.cross_entropy(z, b.y).sum(),
    "times_sigmoid": lambda z, b, p: F.cross_entropy(z, b.y) * p.tau.sigmoid(),
    "uncertainty": lambda z, b, p: _uncertain(z, b, p),
    "stack_sum": lambda z, b, p: torch.stack(_terms(z, b)).sum(),
    "stack_weighted": lambda z, b, p: (
        torch.stack(_terms(z, b)) * torch.tensor([0.3, 0.7], dtype=z.dtype)).sum(),
    "stack_matmul": lambda z, b, p: torch.stack(_terms(z, b)) @ p.s.softmax(0),
    "cat_sum": lambda z, b, p: torch.cat([t.reshape(1) for t in _terms(z, b)]).sum(),
    "python_sum": lambda z, b, p: sum(_terms(z, b), start=torch.zeros((), dtype=z.dtype)) / 2,
    "focal": lambda z, b, p: _focal(z, b),
    "smooth_by_hand": lambda z, b, p: _smooth_by_hand(z, b),
    "distilled": lambda z, b, p: _distilled(z, b),
    "router_z": lambda z, b, p: F.cross_entropy(z, b.y) + 1e-2 * z.logsumexp(1).pow(2).mean(),
    "weight_decay": lambda z, b, p: F.cross_entropy(z, b.y) + 0.1 * p.mix.pow(2).sum(),
    "weight_norm_only": lambda z, b, p: F.mse_loss(z @ p.mix, b.target) + p.mix.norm(),
    "orthogonality": lambda z, b, p: F.mse_loss(z @ p.mix, b.target) + (
        p.mix @ p.mix.T - torch.eye(z.shape[1], dtype=z.dtype)).pow(2).sum(),
    "constant_added": lambda z, b, p: F.mse_loss(z, b.target) + 3.0,
    "constant_taken_from": lambda z, b, p: 5.0 - F.cosine_similarity(z, b.target).mean(),
    "python_scaled": lambda z, b, p: 0.25 * F.cross_entropy(z, b.y) / 3 * 2,
    "batch_constant_added": lambda z, b, p: F.mse_loss(z, b.target) + b.target.pow(2).mean(),
    "targets_of_itself": lambda z, b, p: F.mse_loss(z, z.detach().roll(1, -1)),
    "byol": lambda z, b, p: (
        2 - 2 * F.cosine_similarity(z @ p.mix, z.detach(), dim=-1)).mean(),
    "mean_of_means": lambda z, b, p: (z - b.target).abs().mean(1).mean(0),
    "mean_dim_0": lambda z, b, p: (z - b.target).abs().mean(0).mean(),
    "square_of_class_means": lambda z, b, p: (z.mean(0) * p.w).sum(),
    "two_sizes": lambda z, b, p: F.mse_loss(z, b.target) + (z @ p.mix).abs().sum() / len(z) ** 2,
    "count_times_mean": lambda z, b, p: square(z, b).mean() * _count(b) / 8,
    "half_by_each_count": lambda z, b, p: (square(z, b) * b.mask).sum() / b.mask.sum()
    + (square(z, b) * (1 - b.mask)).sum() / (1 - b.mask).sum(),
    "norm_of_rows": lambda z, b, p: (z - b.target).norm(dim=1).mean(),
    "logit_scale": lambda z, b, p: F.cross_entropy(z * p.tau.exp(), b.y),
    "arcface": lambda z, b, p: F.cross_entropy(
        4 * (F.normalize(z) @ F.normalize(p.mix) - 0.2 * F.one_hot(b.c, z.shape[1])), b.y),
})  # fmt: skip

TOKENS = formulas("scaled by hand", {
    "tokens_by_count": lambda h, b, p: _tokens(h, b).sum() / (b.labels != IGNORED).sum(),
    "tokens_by_mask_guarded": lambda h, b, p: (
        _tokens(h, b) * b.valid).sum() / b.valid.sum().clamp(min=1),
    "tokens_then_samples": lambda h, b, p: _sample_means(h, b),
    "tokens_per_sample": lambda h, b, p: _tokens(h, b).sum(1).mean(),
    "tokens_time_first": lambda h, b, p: F.cross_entropy(
        h.transpose(0, 1).flatten(0, 1), b.labels.T.flatten()),
    "token_z_loss": lambda h, b, p: (
        h.logsumexp(-1).pow(2) * b.valid).sum() / b.valid.sum() + F.cross_entropy(
        h.transpose(1, 2), b.labels),
    "token_values": lambda h, b, p: ((h[..., 0] - b.value) * b.valid).pow(2).sum()
    / (b.valid.sum() + 1e-8) * p.tau.exp(),
    "policy_gradient": lambda h, b, p: -(
        h.log_softmax(-1).gather(2, b.ids[..., None]).squeeze(2) * b.value * b.valid
    ).sum() / b.valid.sum(),
    "dpo": lambda h, b, p: -F.logsigmoid(
        (h.log_softmax(-1).gather(2, b.ids[..., None]).squeeze(2) * b.valid).sum(1)
        * b.sign).mean(),
}, tokens=True)  # fmt: skip

DRAWN = formulas("scaled by hand", {
    "dropout_zeros_counted": lambda z, b, p: (lambda d: d.pow(2).sum() / (d != 0).sum())(
        F.dropout(z, 0.5)),
    "random_mask_counted": lambda z, b, p: (lambda m: (square(z, b)[:, None] * m).sum() / m.sum())(
        (torch.rand_like(z) < 0.5).to(z.dtype)),
    "noise_added_sum": lambda z, b, p: square(z + 0.1 * torch.randn_like(z), b).sum(),
    "noise_added": lambda z, b, p: F.mse_loss(z + 0.1 * torch.randn_like(z), b.target),
    "reparameterised": lambda z, b, p: F.mse_loss(
        z[:, :3] + z[:, 3:].exp() * torch.randn_like(z[:, 3:]), b.target[:, :3]),
}, draws=True)  # fmt: skip

FORMULAS = (*ROWS, *TOKENS, *DRAWN)
