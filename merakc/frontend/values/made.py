"""`torch.tensor` of a list that holds tensors or numbers of a recording, which have no data."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree

from merakc.frontend.replaced import replaced
from merakc.frontend.values.symbols import SYMBOLIC


@contextlib.contextmanager
def recorded_tensors() -> Iterator[None]:
    """Makes such tensors by calls that can be recorded, while it lasts."""
    original = torch.tensor

    def tensor(data: Any, **options: Any) -> torch.Tensor:
        leaves = pytree.tree_leaves(data) if isinstance(data, (list, tuple)) else [data]
        # One of a single tensor makes a copy, and warns.
        inside = (torch.Tensor, *SYMBOLIC) if isinstance(data, (list, tuple)) else SYMBOLIC
        if not any(isinstance(x, inside) for x in leaves):
            return original(data, **options)
        made = _stacked(data, options.get("dtype"), original)
        device = options.get("device")
        return made if device is None else made.to(device)

    with replaced(torch, "tensor", tensor):
        yield


def _stacked(data: Any, dtype: torch.dtype | None, original: Any) -> torch.Tensor:
    """A tensor of a nest of lists; gradients do not pass."""
    if isinstance(data, (list, tuple)):
        parts = [_stacked(item, dtype, original) for item in data]
        common = functools.reduce(torch.promote_types, [p.dtype for p in parts])
        return torch.stack([p.to(common) for p in parts])
    if isinstance(data, torch.Tensor):
        return data.detach().reshape(()).to(dtype or data.dtype)
    if isinstance(data, SYMBOLIC):
        kinds = {torch.SymInt: torch.int64, torch.SymBool: torch.bool}
        scalar: Any = data
        own = dtype or kinds.get(type(data), torch.get_default_dtype())
        return torch.scalar_tensor(scalar, dtype=own)
    made: torch.Tensor = original(data, dtype=dtype)
    return made
