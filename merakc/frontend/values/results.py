"""Which of the tensors that a forward returns is the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree

from merakc.frontend.values.structures import open_dataclasses

# Outputs that are handed on as they are.
PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def find_loss(
    out: Any, is_trained: Callable[[torch.Tensor], bool] = lambda x: x.requires_grad
) -> torch.Tensor | None:
    """The loss: what is called so, or the one number that a gradient can be taken of.

    Of a tuple of several such numbers it is the first. None where there is no number, or several
    of other names: then the loss is made of them outside.
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
    is_one = len({id(x) for x in found}) < 2 or isinstance(out, (tuple, list))
    return found[0] if found and is_one else None


def _number(x: Any) -> torch.Tensor | None:
    is_number = isinstance(x, torch.Tensor) and x.numel() == 1 and x.is_floating_point()
    return x if is_number else None
