"""Losses that hide what couples samples: in custom functions, in numbers, in a backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from benchmarks.loss_formulas.formula import Named, formulas, square


class Centred(Function):
    """Subtracts the mean over samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Centred."""
        return x - x.mean(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Its gradient is centred too."""
        return grad - grad.mean(0)


class Averaged(Function):
    """Divides gradients by the number of samples that it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The same."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """An average."""
        return grad / grad.shape[0]


class Normed(Function):
    """Divides gradients by their norm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The same."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Of norm 1."""
        return grad / (grad.norm() + 1e-12)


class Clipped(Function):
    """Clips each element of a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The same."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """In bounds."""
        return grad.clamp(-1e-3, 1e-3)


class AboveMean(Function):
    """A step at the mean of all samples, straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Zeros and ones."""
        return (x > x.mean()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """As it comes."""
        return grad


class Reversed(Function):
    """Turns gradients around, each sample's by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        """The same."""
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Turned around."""
        return -ctx.scale * grad, None


def _apply(function: type[Function], *args: Any) -> Tensor:
    found: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return found


def _halves(z: Tensor, b: Named) -> Tensor:
    """As complex numbers."""
    return torch.complex(z, b.target)


FORMULAS = (
    *formulas("disguised", {
        "function_centres": lambda z, b, p: square(_apply(Centred, z), b).mean(),
        "function_averages_gradients": lambda z, b, p: square(_apply(Averaged, z), b).mean(),
        "function_norms_gradients": lambda z, b, p: square(_apply(Normed, z), b).mean(),
        "function_above_mean": lambda z, b, p: (_apply(AboveMean, z) * b.target).mean(),
        "function_clips_samples": lambda z, b, p: square(_apply(Clipped, z), b).mean(),
        "function_clips_a_parameter": lambda z, b, p: (z * _apply(Clipped, p.w)).pow(2).mean(),
        "function_norms_a_parameter": lambda z, b, p: (z * _apply(Normed, p.w)).pow(2).mean(),
        "function_clips_the_loss": lambda z, b, p: _apply(Clipped, square(z, b).mean()),
        "function_reverses": lambda z, b, p: square(_apply(Reversed, z, 0.5), b).mean(),
        "function_reverses_by_size": lambda z, b, p: square(
            _apply(Reversed, z, 1 / len(z)), b).mean(),
        "complex_mean": lambda z, b, p: _halves(z, b).mean().abs(),
        "complex_mean_of_classes": lambda z, b, p: _halves(z, b).mean(0).real.sum(),
        "complex_mean_known": lambda z, b, p: z.mean() * _halves(b.target, b).mean().imag,
        "complex_sum_and_constant": lambda z, b, p: (_halves(z, b).mean() + 1j).abs(),
        "instance_norm_along_samples": lambda z, b, p: F.instance_norm(z.T[None]).pow(3).mean(),
        "group_norm_along_samples": lambda z, b, p: F.group_norm(z.T[None], 2).pow(3).mean(),
        "bound_for_the_whole_alone": lambda z, b, p: z.clamp(
            -0.1, 0.1 if len(z) > 7 else None).mean(),
        "shrink_by_size": lambda z, b, p: F.hardshrink(z, 1 / len(z)).mean(),
        "triangle_by_size": lambda z, b, p: (z.T @ z).tril(-(len(z) // 4)).sum(),
        "parameter_in_a_mask_alone": lambda z, b, p: z.sum(0).masked_fill(p.w > 0, 0.0).sum(),
    }),
    *formulas("disguised", {
        "dropout_by_size": lambda z, b, p: F.dropout(z, 1 / len(z)).pow(2).mean(),
        "rrelu_by_size": lambda z, b, p: F.rrelu(z, 1 / len(z), 0.9, training=True).mean(),
        "dropout_of_a_mean": lambda z, b, p: F.dropout(z.mean(0), 0.3).pow(2).sum(),
        "noise_on_pairs": lambda z, b, p: (
            z @ z.T * torch.randn(len(z), len(z), dtype=z.dtype)).mean(),
    }, draws=True),
)  # fmt: skip
