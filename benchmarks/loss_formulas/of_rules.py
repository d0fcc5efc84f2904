"""Losses that reach rules of the algebra of batches which no formula of the table does."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.loss_formulas.formula import CLASSES, Named, formulas
from merakc.kernels import experts  # noqa: F401  registers the op

EXPERTS = 3


def _experts(z: Tensor, p: Named, most: int = 10**6) -> Tensor:
    """Each sample through its own expert's matrix, `most` of an expert at most."""
    ids, order = z[:, :EXPERTS].argmax(1).sort()
    ends = F.one_hot(ids, EXPERTS).sum(0).clamp(max=most).cumsum(0).to(torch.int32)
    weights = p.mix.expand(EXPERTS, -1, -1) * p.w[:EXPERTS, None, None]
    made = torch.ops.merakc.grouped_mm(z[order], weights, ends).tanh()
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return made[back]


def _histogram(z: Tensor) -> Tensor:
    return torch.histc(z.detach()[:, 0].sigmoid(), bins=4, min=0, max=1)


FORMULAS = formulas("of rules", {
    "experts": lambda z, b, p: F.mse_loss(_experts(z, p), b.target),
    "experts_capped": lambda z, b, p: F.mse_loss(_experts(z, p, most=2), b.target),
    "experts_sorted": lambda z, b, p: F.mse_loss(z[z[:, :EXPERTS].argmax(1).argsort()], b.target),
    "labels_of_views": lambda z, b, p: F.cross_entropy(
        torch.cat([z, z @ p.mix]), torch.cat([b.c, b.c])),
    "labels_interleaved": lambda z, b, p: F.cross_entropy(
        torch.cat([z, z @ p.mix]), b.c.repeat_interleave(2)),
    "scaled_by_frequency": lambda z, b, p: F.mse_loss(
        z + F.embedding(b.c, p.square, scale_grad_by_freq=True)[:, :CLASSES], b.target),
    "histogram": lambda z, b, p: F.mse_loss(z, b.target) * _histogram(z).pow(2).sum(),
    "table_for_each": lambda z, b, p: F.mse_loss(
        z, p.mix[0].expand(len(z), -1)) + F.mse_loss(z, p.w.repeat(len(z), 1)),
    "scattered_onto_a_parameter": lambda z, b, p: (
        p.w.scatter_add(0, b.c, z[:, 0]) * p.mix[0]).sum(),
    "pairs_in_a_row": lambda z, b, p: z[::2].pow(2).sum() + z[1].sum(),
    "views_in_turn": lambda z, b, p: (
        torch.stack([z, z @ p.mix], 1).flatten(0, 1).view(len(z), 2, -1)[:, 1] - b.target
    ).pow(2).mean(),
    "views_behind_each_other": lambda z, b, p: (
        torch.cat([z, z @ p.mix]).view(2, len(z), -1)[1] - b.target).pow(2).mean(),
})  # fmt: skip
