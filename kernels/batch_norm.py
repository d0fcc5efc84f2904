"""Batch normalisation that gives the statistics too which running ones follow from:
`merakc::batch_norm_statistics`.

torch's op writes running statistics and returns others, the inverse of a deviation among them, of
which the variance is not to be had without loss. Running ones that the batch's replace altogether
are the batch's own, by the very sums of torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

Normalised = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _batch_norm_statistics(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Normalised:
    """X [n, c, *], normalised over all dims but c; then, [c] each, its mean and the inverse of its
    deviation as the backward wants them, the unbiased variance, and the mean once more.
    """
    mean, variance = x.new_zeros(x.shape[1]), x.new_zeros(x.shape[1])
    out, saved, inverse = torch.native_batch_norm(x, weight, bias, mean, variance, True, 1.0, eps)
    return out, saved, inverse, variance, mean


def _like(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Normalised:
    of_channels = (x.new_empty(x.shape[1]) for _ in range(4))
    return torch.empty_like(x), *of_channels  # type: ignore[return-value]


torch.library.define(
    "merakc::batch_norm_statistics",
    "(Tensor x, Tensor? weight, Tensor? bias, float eps) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
)
torch.library.impl("merakc::batch_norm_statistics", "default", _batch_norm_statistics)
torch.library.register_fake("merakc::batch_norm_statistics", _like)
