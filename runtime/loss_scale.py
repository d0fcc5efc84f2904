"""Losses and gradients that are not finite: every rank skips the step, or none; and the scale of
the loss.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, get_args

import numpy as np
import torch

from merakc.errors import ConfigError, MerakWarning
from merakc.ir.precision import Precision
from merakc.runtime.streams import bring

Tensors = Mapping[str, torch.Tensor]
OnNonfinite = Literal["raise", "skip", "ignore"]
FIRST_SCALE = 2.0**16
GROWTH, BACKOFF, GROWTH_INTERVAL = 2.0, 0.5, 2000  # those of torch.amp.GradScaler
# The smallest normal number of float16: what overflows with it, overflows before it is scaled.
LEAST_SCALE = 2.0**-14
_KIND = attrgetter("device", "dtype")


def check_on_nonfinite(given: str | None) -> None:
    """Raises `ConfigError` for what is not known."""
    if given is not None and given not in get_args(OnNonfinite):
        raise ConfigError(
            f"on_nonfinite={given!r}: what to do in a step whose loss or gradients are not finite "
            f"is one of {', '.join(map(repr, get_args(OnNonfinite)))}"
        )


def loss_scale_for(precision: Precision | None, on_nonfinite: OnNonfinite | None) -> LossScale:
    """That of the first step. Where none is said, a step that is not finite raises, but for scaled
    losses, whose scale is found by steps that overflow. Raises `ConfigError` where those are to be
    ignored.
    """
    if precision is None or not precision.scales_loss:
        return LossScale(False, 1.0, on_nonfinite or "raise")
    if on_nonfinite == "ignore":
        raise ConfigError(
            "on_nonfinite='ignore': the scale of float16's losses is found by leaving steps out "
            "that overflow; say 'skip', or 'raise' for those that no scale can help"
        )
    return LossScale(True, FIRST_SCALE, on_nonfinite or "skip")


@dataclass(slots=True)
class LossScale:
    """What a step's loss is multiplied by before the backward, the same on all ranks; and what is
    done with steps that are not finite.

    Where it is `dynamic` it halves when gradients overflow, to `LEAST_SCALE`, and doubles after
    many steps without (Micikevicius et al. 2018, section 3.2); otherwise it stays. `skipped` counts
    the steps that gave no gradients.
    """

    dynamic: bool
    scale: float
    on_nonfinite: OnNonfinite = "raise"
    good_steps: int = 0
    skipped: int = 0

    def nonfinite(self, gradients: Tensors) -> torch.Tensor | None:
        """Takes the scale out of this rank's gradients, in place: a number above zero where any of
        them is not finite; None where nobody wants to know.
        """
        if self.on_nonfinite == "ignore":
            return None
        return unscaled(gradients.values(), 1 / self.scale)

    def goes_on(self, *, finite: bool) -> bool:
        """Notes whether a step was finite on all ranks, from which the scale of the next follows:
        whether training goes on, with gradients or, warned of, without.
        """
        if finite:
            self.good_steps += 1
            if self.dynamic and self.good_steps % GROWTH_INTERVAL == 0:
                self.scale *= GROWTH
            return True
        self.skipped, self.good_steps = self.skipped + 1, 0
        if self.dynamic:
            self.scale = max(self.scale * BACKOFF, LEAST_SCALE)
            if self.scale >= 1.0:  # a smaller one may help
                return True
        if self.on_nonfinite == "skip":
            warnings.warn(
                f"a loss or gradients that are not finite: all ranks skip this step "
                f"({self.skipped} so far); their optimizers find no gradients in it",
                MerakWarning,
                stacklevel=4,
            )
        return self.on_nonfinite == "skip"


def unscaled(gradients: Iterable[torch.Tensor], factor: float) -> torch.Tensor | None:
    """Multiplies them, in one pass, which is as fast as reading them: so that it costs nothing to
    look at them all. A number above zero where one is not finite; None of no elements.
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    own = [gradient for gradient in gradients if gradient.numel()]
    for kind, gradient in zip(map(_KIND, own), own, strict=True):
        kinds.setdefault(kind, []).append(gradient)
    found: dict[torch.device, torch.Tensor] = {}
    for (device, dtype), tensors in kinds.items():
        tensors = [torch.view_as_real(t) for t in tensors] if dtype.is_complex else tensors
        bad = found.setdefault(device, _float32(0.0, device))
        _unscale(tensors, bad, factor)
    numbers = sorted(found.values(), key=lambda bad: bad.device.type == "cpu")  # the device's first
    return (
        sum((bring(bad, numbers[0].device) for bad in numbers[1:]), numbers[0]) if found else None
    )


def _unscale(tensors: list[torch.Tensor], bad: torch.Tensor, factor: float) -> None:
    """Multiplies tensors of one kind; `bad` becomes 1 where one has a number that is not finite."""
    if tensors[0].is_cuda and tensors[0].dtype is torch.bfloat16:  # for which torch has no kernel
        _unscale_by_norms(tensors, bad, factor)
        return
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, bad, _float32(factor, bad.device))


def _unscale_by_norms(tensors: list[torch.Tensor], bad: torch.Tensor, factor: float) -> None:
    """The same in passes of their own."""
    if factor != 1.0:
        torch._foreach_mul_(tensors, factor)
    largest = torch.stack(torch._foreach_norm(tensors, math.inf))
    bad.masked_fill_(largest.isfinite().all().logical_not(), 1.0)


def _float32(number: float, device: torch.device) -> torch.Tensor:
    """What torch's call takes alone, whatever default dtype or mode the user has."""
    return bring(torch.from_numpy(np.array([number], np.float32)), device)
