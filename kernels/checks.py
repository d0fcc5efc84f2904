"""Checks of values that a step makes: `merakc::counted`.

The proof that a batch can be in parts may rest on what the batch holds, as that every sample has
as many places for an image as its image fills. What it rests on is checked where it is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from merakc.errors import RecordError

_checking = ContextVar("checking", default=True)


@contextmanager
def unchecked() -> Iterator[None]:
    """Lets everything pass, on values of no meaning."""
    token = _checking.set(False)
    try:
        yield
    finally:
        _checking.reset(token)


@torch.library.custom_op("merakc::counted", mutates_args=())
def counted(mask: Tensor, count: int, where: str) -> Tensor:
    """`mask`, which has to be true at `count` places. Raises `RecordError` where it is not."""
    found = int(mask.count_nonzero())
    if found != count and _checking.get():
        raise RecordError(
            f"{where}: a part of the batch has {found} places, and values for {count}; samples in "
            "one part bring what fills their own places: sort the batch so, or train with dp=1 and "
            "micro_batches=1"
        )
    return mask.clone()


@counted.register_fake
def _(mask: Tensor, count: int, where: str) -> Tensor:
    return torch.empty_like(mask)
