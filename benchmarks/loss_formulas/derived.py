"""Losses of derivatives that the forward takes itself, and of codes that it looks up."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.loss_formulas.formula import CLASSES, Named, formulas


def _slope(of: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """What `torch.func.grad` gives at the features."""
    found: Tensor = torch.func.grad(of)(z)
    return found


def _critic(z: Tensor, p: Named) -> Tensor:
    return torch.tanh(z @ p.mix).pow(2).sum(-1)


def _one_sample(z: Tensor, c: Tensor, p: Named) -> Tensor:
    return F.cross_entropy((z @ p.mix)[None], c[None])


def _gradient_of_each(z: Tensor, b: Named, p: Named) -> Tensor:
    each = torch.func.vmap(torch.func.grad(lambda z, c: _one_sample(z, c, p)))(z, b.c)
    return each.norm(dim=1).mean()


def _directional(z: Tensor, b: Named, p: Named) -> Tensor:
    _, found = torch.func.jvp(lambda z: _critic(z, p), (z,), (b.target,))
    return found.pow(2).mean()


def _coded(z: Tensor, code: Tensor, b: Named) -> Tensor:
    """The losses of a codebook: of what is decoded, straight through, of codes and commitment."""
    through = z + (code - z).detach()
    loss = F.mse_loss(through, b.target) + F.mse_loss(code, z.detach())
    return loss + 0.25 * F.mse_loss(z, code.detach())


def _codes_used(z: Tensor, p: Named) -> Tensor:
    """How many codes are used, as the perplexity of their frequencies."""
    used = F.one_hot(torch.cdist(z, p.proto).argmin(1), 4).to(z.dtype).mean(0)
    return (-(used * (used + 1e-10).log()).sum()).exp()


FORMULAS = formulas("derivatives and codes", {
    "gradient_penalty": lambda z, b, p: (
        (_slope(lambda z: _critic(z, p).sum(), z).norm(dim=1) - 1) ** 2).mean(),
    "gradient_of_ce": lambda z, b, p: F.cross_entropy(z, b.y) + _slope(
        lambda z: F.cross_entropy(z @ p.mix, b.y), z).pow(2).sum(),
    "gradient_of_weighted_nll": lambda z, b, p: _slope(lambda z: F.nll_loss(
        z.log_softmax(1), b.y, weight=p.w.detach().exp()), z).abs().sum(),
    "gradient_of_ce_sum": lambda z, b, p: _slope(
        lambda z: F.cross_entropy(z @ p.mix, b.y, reduction="sum"), z).pow(2).mean(),
    "gradient_of_each_sample": _gradient_of_each,
    "directional_derivative": _directional,
    "codebook": lambda z, b, p: _coded(
        z, p.proto[(z[:, None] - p.proto).pow(2).sum(-1).argmin(1)], b),
    "codebook_by_embedding": lambda z, b, p: _coded(
        z, F.embedding(torch.cdist(z, p.proto).argmin(1), p.proto), b),
    "codebook_by_one_hot": lambda z, b, p: _coded(
        z, F.one_hot(torch.cdist(z, p.proto).argmin(1), 4).to(z.dtype) @ p.proto, b),
    "codebook_and_usage": lambda z, b, p: _codes_used(z, p) * F.mse_loss(z, b.target),
    "largest_share_of_losses": lambda z, b, p: F.cross_entropy(
        z, b.c, reduction="none").topk(len(z) // 2).values.mean(),
    "own_class_by_one_hot": lambda z, b, p: (
        F.one_hot(z.argmax(-1), CLASSES) * z).sum(1).mean(),
})  # fmt: skip
