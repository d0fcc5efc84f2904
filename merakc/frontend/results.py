"""Which of the tensors that a forward returns is the loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def find_loss(out: Any) -> torch.Tensor | None:
    """`.loss`, `["loss"]`, a scalar, or the first of a tuple; None where that is no number."""
    loss = getattr(out, "loss", None)
    if loss is None and isinstance(out, Mapping):
        loss = out.get("loss")
    if loss is None and isinstance(out, (tuple, list)) and out:
        loss = out[0]
    if loss is None:
        loss = out
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return loss
    return None
