"""Which of the tensors that a forward returns is the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree

from merakc.errors import RecordError
from merakc.frontend.values.structures import open_dataclasses

# Outputs that are handed on as they are.
PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def find_loss(
    out: Any, is_trained: Callable[[torch.Tensor], bool] = lambda x: x.requires_grad
) -> torch.Tensor | None:
    """The loss: what is called so, or the one number that a gradient can be taken of.

    Of a tuple of several such numbers it is the first. None where there is no number. Raises
    `RecordError` where there are several of other names.
    """
    if isinstance(out, Mapping) and "loss" in out:
        return _number(out["loss"])
    if hasattr(out, "loss"):
        return _number(out.loss)
    open_dataclasses(out)
    leaves, _ = pytree.tree_flatten_with_path(out)
    numbers = {pytree.keystr(path): x for path, x in leaves if _number(x) is not None}
    numbers = {name: x for name, x in numbers.items() if not x.dim()} or numbers
    trained = {name: x for name, x in numbers.items() if is_trained(x)}
    found = list((trained or numbers).values())
    if len({id(x) for x in found}) < 2 or isinstance(out, (tuple, list)):
        return found[0] if found else None
    if not trained:
        return None
    listed = ", ".join(name.strip("[]'.") for name in trained)
    raise RecordError(
        f"the forward returns several numbers that may be the loss ({listed}); return the one to "
        "train on, or their sum, as 'loss'"
    )


def _number(x: Any) -> torch.Tensor | None:
    is_number = isinstance(x, torch.Tensor) and x.numel() == 1 and x.is_floating_point()
    return x if is_number else None
