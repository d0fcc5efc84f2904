"""Gradients that are not finite: every rank skips the step, or none; and the scale of the loss."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from merakc.errors import MerakWarning
from merakc.ir.precision import Precision

Tensors = Mapping[str, torch.Tensor]
FIRST_SCALE = 2.0**16
GROWTH, BACKOFF, GROWTH_INTERVAL = 2.0, 0.5, 2000  # those of torch.amp.GradScaler
# The smallest normal number of float16: what overflows with it, overflows before it is scaled.
LEAST_SCALE = 2.0**-14


def loss_scale_for(precision: Precision | None) -> LossScale | None:
    """That of the first step; None where nothing is mixed, and the user's loop has its way."""
    if precision is None:
        return None
    return LossScale(precision.scales_loss, FIRST_SCALE if precision.scales_loss else 1.0)


@dataclass(slots=True)
class LossScale:
    """What a step's loss is multiplied by before the backward, the same on all ranks.

    Where it is `dynamic` it halves when gradients overflow, to `LEAST_SCALE`, and doubles after
    many steps without (Micikevicius et al. 2018, section 3.2); otherwise it stays. `skipped` counts
    the steps that gave no gradients.
    """

    dynamic: bool
    scale: float
    good_steps: int = 0
    skipped: int = 0

    def finite(self, gradients: Tensors, group: dist.ProcessGroup | None) -> bool:
        """Takes the scale out of the gradients, in place; whether all ranks' are finite.

        Collective. The scale of the next step follows from it.
        """
        own = [g for g in gradients.values() if g.numel()]
        bad = torch.zeros((), device=own[0].device if own else None)
        if own:
            if self.scale != 1.0:
                torch._foreach_mul_(own, 1 / self.scale)
            largest = torch._foreach_norm(own, float("inf"))
            bad = (~torch.stack([v.float() for v in largest]).isfinite().all()).float()
        if group is not None:
            dist.all_reduce(bad, dist.ReduceOp.MAX, group=group)
        found = not bad.item()
        self._update(found)
        return found

    def _update(self, finite: bool) -> None:
        if finite:
            self.good_steps += 1
            if self.dynamic and self.good_steps % GROWTH_INTERVAL == 0:
                self.scale *= GROWTH
            return
        self.skipped, self.good_steps = self.skipped + 1, 0
        if self.dynamic:
            self.scale = max(self.scale * BACKOFF, LEAST_SCALE)
        if not self.dynamic or self.scale < 1.0:
            warnings.warn(
                f"gradients that are not finite: all ranks skip this step ({self.skipped} so far); "
                "their optimizers find no gradients in it",
                MerakWarning,
                stacklevel=4,
            )
