"""Losses that are no sum over samples: statistics, overlaps, hard examples, groups, experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.loss_formulas.formula import Named, formulas, square


def _covariance(z: Tensor) -> Tensor:
    centred = z - z.mean(0)
    return centred.T @ centred / (z.shape[0] - 1)


def _off_diagonal(m: Tensor) -> Tensor:
    return m - torch.diag(torch.diagonal(m))


def _barlow(z: Tensor, p: Named) -> Tensor:
    other = z @ p.mix
    one = (z - z.mean(0)) / z.std(0)
    two = (other - other.mean(0)) / other.std(0)
    c = one.T @ two / len(z)
    return (torch.diagonal(c) - 1).pow(2).sum() + 0.1 * _off_diagonal(c).pow(2).sum()


def _vicreg(z: Tensor, p: Named) -> Tensor:
    other = z @ p.mix
    spread = F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean()
    return F.mse_loss(z, other) + spread + _off_diagonal(_covariance(z)).pow(2).sum() / z.shape[1]


def _tversky(z: Tensor, b: Named, fp: float, fn: float) -> Tensor:
    prob = z.sigmoid()
    hit, extra, missed = ((x).sum() for x in (
        prob * b.bits, prob * (1 - b.bits), (1 - prob) * b.bits))  # fmt: skip
    return 1 - (hit + 1) / (hit + fp * extra + fn * missed + 1)


def _dice_by_class(z: Tensor, b: Named) -> Tensor:
    prob = z.sigmoid()
    return (1 - 2 * (prob * b.bits).sum(0) / (prob.sum(0) + b.bits.sum(0) + 1e-6)).mean()


def _iou(z: Tensor, b: Named) -> Tensor:
    prob = z.sigmoid()
    overlap = (prob * b.bits).sum()
    return 1 - overlap / (prob.sum() + b.bits.sum() - overlap)


def _r2(z: Tensor, b: Named) -> Tensor:
    spread = (b.target - b.target.mean(0)).pow(2).sum()
    return (z - b.target).pow(2).sum() / spread


def _pearson(z: Tensor, b: Named) -> Tensor:
    one, two = z[:, 0] - z[:, 0].mean(), b.time - b.time.mean()
    return 1 - F.cosine_similarity(one, two, dim=0)


def _concordance(z: Tensor, b: Named) -> Tensor:
    one, two = z[:, 0], b.time
    both = ((one - one.mean()) * (two - two.mean())).mean()
    return 1 - 2 * both / (one.var() + two.var() + (one.mean() - two.mean()).pow(2))


def _kernel(x: Tensor, y: Tensor) -> Tensor:
    return (-(x[:, None] - y[None]).pow(2).sum(-1) / 4).exp()


def _mmd(z: Tensor, b: Named) -> Tensor:
    t = b.target
    return _kernel(z, z).mean() + _kernel(t, t).mean() - 2 * _kernel(z, t).mean()


def _hsic(z: Tensor, b: Named) -> Tensor:
    n = len(z)
    centring = torch.eye(n, dtype=z.dtype) - 1 / n
    kernels = _kernel(z, z) @ centring @ _kernel(b.target, b.target) @ centring
    return torch.trace(kernels) / (n - 1) ** 2


def _imsat(z: Tensor) -> Tensor:
    prob = z.softmax(1)
    mean = prob.mean(0)
    return (mean * mean.log()).sum() - (prob * prob.log()).sum(1).mean()


def _group_dro(z: Tensor, b: Named) -> Tensor:
    one_hot = F.one_hot(b.group, 3).to(z.dtype)
    each = one_hot.T @ square(z, b) / one_hot.sum(0)
    return (each.detach().softmax(0) * each).sum()


def _worst_group(z: Tensor, b: Named) -> Tensor:
    total = torch.zeros(3, dtype=z.dtype).index_add(0, b.group, square(z, b))
    return (total / torch.bincount(b.group, minlength=3)).max()


def _positive_unlabelled(z: Tensor, b: Named) -> Tensor:
    score, positive = z[:, 0], b.mask
    risk = 0.4 * (F.softplus(-score) * positive).sum() / positive.sum()
    unlabelled = (F.softplus(score) * (1 - positive)).sum() / (1 - positive).sum()
    negative = unlabelled - 0.4 * (F.softplus(score) * positive).sum() / positive.sum()
    return risk + torch.clamp(negative, min=0)


def _f1(z: Tensor, b: Named) -> Tensor:
    prob = z.sigmoid()
    hit = (prob * b.bits).sum(0)
    return 1 - (2 * hit / (prob.sum(0) + b.bits.sum(0)).clamp(min=1e-6)).mean()


def _whitening(z: Tensor, b: Named) -> Tensor:
    eye = torch.eye(z.shape[1], dtype=z.dtype)
    root = torch.linalg.cholesky(_covariance(z) + eye)
    white = torch.linalg.solve_triangular(root, (z - z.mean(0)).T, upper=False).T
    return F.mse_loss(white, b.target)


def _balance(h: Tensor, p: Named, top: int) -> Tensor:
    gates = (h.flatten(0, 1) @ p.gate).softmax(-1)
    chosen = F.one_hot(gates.topk(top, -1).indices, 4).to(h.dtype)
    return 4 * (chosen.mean(0) * gates.mean(0)).sum()


def _balance_masked(h: Tensor, b: Named, p: Named) -> Tensor:
    gates, mask = (h.flatten(0, 1) @ p.gate).softmax(-1), b.valid.flatten()[:, None]
    chosen = F.one_hot(gates.argmax(-1), 4) * mask
    share = chosen.sum(0) / mask.sum()
    return 4 * (share * ((gates * mask).sum(0) / mask.sum())).sum()


def _importance(h: Tensor, p: Named) -> Tensor:
    load = (h.flatten(0, 1) @ p.gate).softmax(-1).sum(0)
    return load.var() / load.mean().pow(2)


def _capacity(h: Tensor, b: Named, p: Named) -> Tensor:
    gates = (h.flatten(0, 1) @ p.gate).softmax(-1)
    chosen = F.one_hot(gates.argmax(-1), 4)
    kept = (chosen.cumsum(0) <= 7) * chosen
    return ((gates * kept).sum(-1) - b.value.flatten()).pow(2).mean()


def _ce(h: Tensor, b: Named) -> Tensor:
    return F.cross_entropy(h.transpose(1, 2), b.labels)


ROWS = formulas("statistics", {
    "barlow_twins": lambda z, b, p: _barlow(z, p),
    "vicreg": lambda z, b, p: _vicreg(z, p),
    "dice": lambda z, b, p: _tversky(z, b, 0.5, 0.5),
    "dice_by_class": lambda z, b, p: _dice_by_class(z, b),
    "tversky": lambda z, b, p: _tversky(z, b, 0.3, 0.7),
    "focal_tversky": lambda z, b, p: _tversky(z, b, 0.3, 0.7) ** 0.75,
    "iou": lambda z, b, p: _iou(z, b),
    "f1": lambda z, b, p: _f1(z, b),
    "rmse": lambda z, b, p: F.mse_loss(z, b.target).sqrt(),
    "log_cosh_of_mean": lambda z, b, p: (z - b.target).mean().cosh().log(),
    "r2": lambda z, b, p: _r2(z, b),
    "explained_variance": lambda z, b, p: (
        (b.target - z).var(0).mean() / b.target.var(0).mean()),
    "pearson": lambda z, b, p: _pearson(z, b),
    "concordance": lambda z, b, p: _concordance(z, b),
    "variance": lambda z, b, p: F.relu(1 - z.std(0)).mean(),
    "covariance": lambda z, b, p: _off_diagonal(_covariance(z)).pow(2).sum(),
    "correlation": lambda z, b, p: _off_diagonal(torch.corrcoef(z.T)).pow(2).mean(),
    "mmd": lambda z, b, p: _mmd(z, b),
    "coral": lambda z, b, p: (_covariance(z) - _covariance(b.target)).pow(2).sum(),
    "hsic": lambda z, b, p: _hsic(z, b),
    "imsat": lambda z, b, p: _imsat(z),
    "centred": lambda z, b, p: F.mse_loss(z - z.mean(0), b.target),
    "whitening": lambda z, b, p: _whitening(z, b),
    "normalised_by_hand": lambda z, b, p: F.mse_loss((z - z.mean(0)) / z.std(0), b.target),
    "scaled_by_largest": lambda z, b, p: F.mse_loss(z / z.abs().max(), b.target),
    "ohem": lambda z, b, p: square(z, b).topk(z.shape[0] // 2).values.mean(),
    "ohem_sorted": lambda z, b, p: square(z, b).sort(descending=True).values[:3].mean(),
    "max_of_losses": lambda z, b, p: square(z, b).max(),
    "median_of_losses": lambda z, b, p: square(z, b).median(),
    "quantile_of_losses": lambda z, b, p: square(z, b).quantile(0.7),
    "logsumexp_of_losses": lambda z, b, p: square(z, b).logsumexp(0),
    "cvar": lambda z, b, p: p.tau + F.relu(square(z, b) - p.tau).mean() / 0.3,
    "chi2_dro": lambda z, b, p: (F.relu(square(z, b) - p.tau).pow(2).mean()).sqrt() + p.tau,
    "above_mean_loss": lambda z, b, p: (lambda each: (
        each * (each.detach() > each.detach().mean())).sum() / len(each))(square(z, b)),
    "group_dro": lambda z, b, p: _group_dro(z, b),
    "worst_group": lambda z, b, p: _worst_group(z, b),
    "positive_unlabelled": lambda z, b, p: _positive_unlabelled(z, b),
    "parity_gap": lambda z, b, p: F.cross_entropy(z, b.y) + (
        (z[:, 0] * b.mask).sum() / b.mask.sum()
        - (z[:, 0] * (1 - b.mask)).sum() / (1 - b.mask).sum()).abs(),
    "product_of_means": lambda z, b, p: F.mse_loss(z, b.target) * (z @ p.mix).abs().mean(),
    "ratio_of_sums": lambda z, b, p: square(z, b).sum() / z.pow(2).sum(),
    "spectral": lambda z, b, p: torch.linalg.svdvals(z).sum(),
    "log_det": lambda z, b, p: -torch.logdet(
        _covariance(z) + torch.eye(z.shape[1], dtype=z.dtype)),
    "norm_of_everything": lambda z, b, p: (z - b.target).norm(),
    "learnt_weight_of_sum": lambda z, b, p: (p.w * z.sum(0)).tanh().sum(),
})  # fmt: skip

TOKENS = formulas("experts and tokens", {
    "balance_top1": lambda h, b, p: _ce(h, b) + 0.1 * _balance(h, p, 1),
    "balance_top2": lambda h, b, p: _ce(h, b) + 0.1 * _balance(h, p, 2),
    "balance_masked": lambda h, b, p: _ce(h, b) + 0.1 * _balance_masked(h, b, p),
    "balance_per_sample": lambda h, b, p: _ce(h, b) + 0.1 * (
        (h @ p.gate).softmax(-1).mean(1).pow(2)).sum(-1).mean(),
    "importance": lambda h, b, p: _ce(h, b) + 0.1 * _importance(h, p),
    "router_z_tokens": lambda h, b, p: _ce(h, b) + 0.1 * (
        h @ p.gate).logsumexp(-1).pow(2).mean(),
    "capacity_by_cumsum": lambda h, b, p: _capacity(h, b, p),
    "unlikelihood_of_mean": lambda h, b, p: -(1 - h.softmax(-1).mean((0, 1))).log().sum(),
    "perplexity": lambda h, b, p: _ce(h, b).exp(),
    "code_usage": lambda h, b, p: (lambda q: (q * (q + 1e-9).log()).sum())(
        h.softmax(-1).mean((0, 1))),
    "top_tokens": lambda h, b, p: F.cross_entropy(
        h.transpose(1, 2), b.labels, reduction="none").flatten().topk(6).values.mean(),
    "token_pairs": lambda h, b, p: (h.flatten(0, 1) @ h.flatten(0, 1).T).tanh().mean(),
}, tokens=True)  # fmt: skip

DRAWN = formulas("statistics", {
    "mixup_drawn": lambda z, b, p: (lambda order: 0.7 * F.cross_entropy(z, b.c)
        + 0.3 * F.cross_entropy(z, b.c[order]))(torch.randperm(len(z))),
    "cutmix_features_drawn": lambda z, b, p: F.mse_loss(
        torch.cat([z[:, :3], z[torch.randperm(z.shape[0])][:, 3:]], 1), b.target),
    "drawn_negatives": lambda z, b, p: F.triplet_margin_loss(
        z, b.target, z[torch.randint(0, len(z), (len(z),))]),
    "dropout_then_variance": lambda z, b, p: F.dropout(z, 0.3).var(0).sum(),
    "one_draw_for_all": lambda z, b, p: F.mse_loss(z * torch.rand(()), b.target),
    "one_draw_for_classes": lambda z, b, p: (z * torch.rand(z.shape[1])).pow(2).mean(),
}, draws=True)  # fmt: skip

FORMULAS = (*ROWS, *TOKENS, *DRAWN)
