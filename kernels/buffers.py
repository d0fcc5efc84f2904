"""What forwards write to buffers.

`merakc::overwritten`: what is written in place under `no_grad`, where autograd does not look, has
the new value and the gradient of the old one. `merakc::batch_norm_statistics`: what a batch norm
normalises, with the statistics that running ones follow from. torch's op writes running ones and
returns others, the inverse of a deviation among them, of which the variance is not to be had
without loss; but running ones that the batch's replace altogether are those, by torch's own sums.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Normalised = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op("merakc::overwritten", mutates_args=())
def overwritten(before: Tensor, now: Tensor) -> Tensor:
    """`now`, of the shape and dtype of `before`, to which the gradient goes as it comes."""
    assert (before.shape, before.dtype) == (now.shape, now.dtype), (before, now)
    return now.clone()


@overwritten.register_fake
def _(before: Tensor, now: Tensor) -> Tensor:
    return torch.empty_like(now)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return grad, None


overwritten.register_autograd(_differentiate)


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
