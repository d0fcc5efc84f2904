"""Checks of values that follow from the batch: `merakc::counted`, `within` and `local`.

The proof that a batch can be in parts may rest on what the batch holds, as that every sample has
as many places for an image as its image fills. What it rests on is checked where it is used.

That a selection of rows stays inside each sample is no matter of shapes. It is checked on the whole
batch before a step; a part then has the places within each of its samples.
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
            "one part bring just what fills their own places: give no more values than there are "
            "places, sort the batch so, or train with dp=1 and micro_batches=1"
        )
    return mask.clone()


@counted.register_fake
def _(mask: Tensor, count: int, where: str) -> Tensor:
    return torch.empty_like(mask)


def _firsts(places: Tensor, each: int, rows: int) -> Tensor:
    """The first place of the sample that each of `places` [samples * rows] is to stay in, where a
    sample has `each` places.
    """
    return torch.arange(len(places), device=places.device) // rows * each


def _inside(found: Tensor, each: int, where: str) -> Tensor:
    if found.numel() and not bool(((found >= 0) & (found < each)).all()):
        raise RecordError(
            f"{where}: places that the batch says go from one sample to another, or samples have "
            "unlike numbers of them, and parts of the batch hold only their own; give each sample "
            "as many, in its own rows, or train with dp=1 and micro_batches=1"
        )
    return found


@torch.library.custom_op("merakc::within", mutates_args=())
def within(places: Tensor, each: int, rows: int, where: str) -> Tensor:
    """`places` [samples * rows] as places within each sample's own `each`. Raises `RecordError`
    where one is in another sample.
    """
    return _inside(places - _firsts(places, each, rows), each, where)


@torch.library.custom_op("merakc::local", mutates_args=())
def local(places: Tensor, each: int, rows: int, where: str) -> Tensor:
    """The places in a part of a batch, by those within each of its samples."""
    return _inside(places.clone(), each, where) + _firsts(places, each, rows)


@within.register_fake
@local.register_fake
def _(places: Tensor, each: int, rows: int, where: str) -> Tensor:
    return torch.empty_like(places)
