"""Losses that compare each sample with others: contrastive, ranking, of pairs and of triplets."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.loss_formulas.formula import Named, formulas


def _info_nce(z: Tensor, p: Named, temperature: float = 0.5) -> Tensor:
    scores = F.normalize(z) @ F.normalize(z @ p.mix).T / temperature
    return F.cross_entropy(scores, torch.arange(z.shape[0]))


def _clip(z: Tensor, p: Named) -> Tensor:
    scores = p.tau.exp() * F.normalize(z) @ F.normalize(z @ p.mix).t()
    own = torch.arange(len(z))
    return (F.cross_entropy(scores, own) + F.cross_entropy(scores.t(), own)) / 2


def _siglip(z: Tensor, p: Named) -> Tensor:
    scores = p.tau.exp() * F.normalize(z) @ F.normalize(z @ p.mix).t() + p.s[0]
    return -F.logsigmoid(scores * (2 * torch.eye(len(z), dtype=z.dtype) - 1)).sum() / len(z)


def _nt_xent(z: Tensor, p: Named) -> Tensor:
    n = z.shape[0]
    both = F.normalize(torch.cat([z, z @ p.mix]))
    scores = (both @ both.T / 0.5).masked_fill(torch.eye(2 * n, dtype=torch.bool), -1e9)
    return F.cross_entropy(scores, torch.cat([torch.arange(n) + n, torch.arange(n)]))


def _simclr_interleaved(z: Tensor, p: Named) -> Tensor:
    both = F.normalize(torch.stack([z, z @ p.mix], 1).flatten(0, 1))
    own = torch.arange(len(both))
    scores = (both @ both.T).masked_fill(own[:, None] == own[None], -1e9)
    return F.cross_entropy(scores, own ^ 1)


def _sup_con(z: Tensor, b: Named) -> Tensor:
    unit = F.normalize(z)
    scores = unit @ unit.T / 0.3
    other = ~torch.eye(len(z), dtype=torch.bool)
    same = (b.c[:, None] == b.c[None, :]) & other
    log_prob = scores - (scores.exp() * other).sum(1, keepdim=True).log()
    each = -(log_prob * same).sum(1) / same.sum(1).clamp(min=1)
    return each.sum() / same.any(1).sum()


def _distances(z: Tensor) -> Tensor:
    return (z[:, None] - z[None]).pow(2).sum(-1)


def _batch_hard(z: Tensor, b: Named) -> Tensor:
    distances, same = _distances(z), b.c[:, None] == b.c[None]
    farthest = distances.masked_fill(~same, -1e9).amax(1)
    nearest = distances.masked_fill(same, 1e9).amin(1)
    return F.relu(farthest - nearest + 1).mean()


def _all_triplets(z: Tensor, b: Named) -> Tensor:
    distances, same = _distances(z), b.c[:, None] == b.c[None]
    valid = same[:, :, None] & ~same[:, None, :]
    each = F.relu(distances[:, :, None] - distances[:, None, :] + 0.5) * valid
    return each.sum() / ((each > 0).sum() + 1e-9)


def _n_pair(z: Tensor, b: Named, p: Named) -> Tensor:
    same = (b.c[:, None] == b.c[None]).to(z.dtype)
    scores = z @ (z @ p.mix).T
    return F.cross_entropy(scores, same / same.sum(1, keepdim=True)) + 0.01 * z.pow(2).sum(1).mean()


def _contrastive_margin(z: Tensor, b: Named) -> Tensor:
    distances, same = _distances(z), (b.c[:, None] == b.c[None]).double()
    return (same * distances + (1 - same) * F.relu(1 - distances)).triu(1).sum() / len(z)


def _list_mle(z: Tensor, b: Named) -> Tensor:
    scores = z[:, 0][b.time.argsort(descending=True)]
    return (scores.flip(0).logcumsumexp(0).flip(0) - scores).mean()


def _pairwise_hinge(z: Tensor, b: Named) -> Tensor:
    score = z[:, 0]
    better = (b.time[:, None] > b.time[None]).to(z.dtype)
    return (F.relu(1 - (score[:, None] - score[None])) * better).sum() / better.sum()


def _rank_net_by_group(z: Tensor, b: Named) -> Tensor:
    score = z[:, 0]
    pairs = (b.group[:, None] == b.group[None]) & (b.time[:, None] > b.time[None])
    return (F.softplus(score[None] - score[:, None]) * pairs).sum() / pairs.sum().clamp(min=1)


def _auc(z: Tensor, b: Named) -> Tensor:
    gap = z[:, 0][:, None] - z[:, 0][None]
    pairs = b.mask[:, None] * (1 - b.mask)[None]
    return ((-gap).sigmoid() * pairs).sum() / pairs.sum()


def _cox(z: Tensor, b: Named) -> Tensor:
    order = b.time.argsort(descending=True)
    risk, event = z[:, 0][order], b.mask[order]
    return -((risk - risk.logcumsumexp(0)) * event).sum() / event.sum()


def _cox_by_mask(z: Tensor, b: Named) -> Tensor:
    at_risk = (b.time[None] >= b.time[:, None]).to(z.dtype)
    each = z[:, 0] - (at_risk @ z[:, 0].exp()).log()
    return -(each * b.mask).sum() / b.mask.sum()


def _sinkhorn(z: Tensor, p: Named) -> Tensor:
    scores = F.normalize(z) @ F.normalize(p.proto).T
    with torch.no_grad():
        codes = (scores / 0.3).exp()
        for _ in range(3):
            codes = codes / codes.sum(0, keepdim=True) / 4
            codes = codes / codes.sum(1, keepdim=True) / len(z)
        codes = codes * len(z)
    return -(codes * ((z @ p.mix) @ p.proto.T).log_softmax(1)).sum(1).mean()


def _prototypes(z: Tensor, b: Named) -> Tensor:
    one_hot = F.one_hot(b.c, z.shape[1]).to(z.dtype)
    means = (one_hot.T @ z.detach()) / one_hot.sum(0).clamp(min=1)[:, None]
    return F.cross_entropy(-(z[:, None] - means[None]).pow(2).sum(-1), b.c)


def _prototypical(z: Tensor, b: Named) -> Tensor:
    one_hot = F.one_hot(b.group, 3).to(z.dtype)
    means = one_hot.T @ z / one_hot.sum(0)[:, None]
    return F.cross_entropy(-torch.cdist(z, means).pow(2), b.group)


def _circle(z: Tensor, b: Named) -> Tensor:
    unit = F.normalize(z)
    scores, same = unit @ unit.T, b.c[:, None] == b.c[None]
    other = ~torch.eye(len(z), dtype=torch.bool)
    near = (-4 * scores).masked_fill(~(same & other), -1e9).flatten().logsumexp(0)
    far = (4 * scores).masked_fill(same, -1e9).flatten().logsumexp(0)
    return F.softplus(near + far)


def _uniformity(z: Tensor, p: Named) -> Tensor:
    unit = F.normalize(z)
    pairs = torch.pdist(unit).pow(2).mul(-2).exp().mean().log()
    return (unit - F.normalize(z @ p.mix)).pow(2).sum(1).mean() + pairs


FORMULAS = formulas("contrastive and ranking", {
    "info_nce": lambda z, b, p: _info_nce(z, p),
    "info_nce_and_ce": lambda z, b, p: F.cross_entropy(z, b.y) + 0.5 * _info_nce(z, p),
    "clip": lambda z, b, p: _clip(z, p),
    "siglip": lambda z, b, p: _siglip(z, p),
    "nt_xent": lambda z, b, p: _nt_xent(z, p),
    "simclr_interleaved": lambda z, b, p: _simclr_interleaved(z, p),
    "sup_con": lambda z, b, p: _sup_con(z, b),
    "batch_hard": lambda z, b, p: _batch_hard(z, b),
    "all_triplets": lambda z, b, p: _all_triplets(z, b),
    "n_pair": lambda z, b, p: _n_pair(z, b, p),
    "contrastive_margin": lambda z, b, p: _contrastive_margin(z, b),
    "circle": lambda z, b, p: _circle(z, b),
    "uniformity": lambda z, b, p: _uniformity(z, p),
    "list_net": lambda z, b, p: -(b.time.softmax(0) * z[:, 0].log_softmax(0)).sum(),
    "list_mle": lambda z, b, p: _list_mle(z, b),
    "pairwise_hinge": lambda z, b, p: _pairwise_hinge(z, b),
    "rank_net_by_group": lambda z, b, p: _rank_net_by_group(z, b),
    "auc": lambda z, b, p: _auc(z, b),
    "cox": lambda z, b, p: _cox(z, b),
    "cox_by_mask": lambda z, b, p: _cox_by_mask(z, b),
    "sinkhorn": lambda z, b, p: _sinkhorn(z, p),
    "prototypes": lambda z, b, p: _prototypes(z, b),
    "prototypical": lambda z, b, p: _prototypical(z, b),
    "neighbours": lambda z, b, p: (z[1:] - z[:-1]).pow(2).mean(),
    "rolled_negatives": lambda z, b, p: F.triplet_margin_loss(z, b.target, z.roll(1, 0)),
    "flipped_mixup": lambda z, b, p: F.cross_entropy(0.7 * z + 0.3 * z.flip(0), b.c),
    "softmax_over_batch": lambda z, b, p: -(z[:, 0].softmax(0) * b.weight).sum(),
    "attention_over_batch": lambda z, b, p: F.mse_loss((z @ z.T).softmax(1) @ z, b.target),
})  # fmt: skip
