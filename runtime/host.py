"""The memory beside a device, where the plan has some of a rank's state live.

Of a GPU it is pinned memory of its host. A CPU has a second pool: memory of its own for all that
lives there, copied to and from as over a link, and counted apart (`merakc.runtime.live_bytes`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import _disable_current_modes

from merakc.kernels.host import copy
from merakc.runtime.streams import Work

HOST = torch.device("cpu")
_pool: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()


def empty(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory beside `device` for so many elements."""
    with _disable_current_modes():  # those that count what calls make
        made = torch.empty(numel, dtype=dtype, device=HOST, pin_memory=device.type == "cuda")
    storage = made.untyped_storage()
    _pool[storage._cdata] = storage
    return made


def brought_down(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy of a flat tensor of the device's, beside it. The host may go on before it is there."""
    return empty(tensor.numel(), dtype, tensor.device).copy_(tensor, non_blocking=True)


def brought_up(target: torch.Tensor, source: torch.Tensor) -> None:
    """Fills a device's tensor with what is beside it, in its dtype. The host may go on before."""
    if source.dtype != target.dtype:  # or the link would carry more, from memory that is not pinned
        source = empty(source.numel(), target.dtype, target.device).copy_(source)
    target.copy_(source, non_blocking=True)


def fetch(target: torch.Tensor, source: torch.Tensor) -> Work | None:
    """Fills a device's tensor with one of the host's, beside the computing; what is returned lets
    that go on once it is there.
    """
    join = copy(target, source, target.device, back=True)
    return None if join is None else _Copying(target, join)


class _Copying:
    """A copy into `target`, which lives until the computing has waited for it."""

    def __init__(self, target: torch.Tensor, join: Callable[[], None]) -> None:
        self._target, self._join = target, join

    def wait(self) -> None:
        """The computing goes on once it has ended; the host does at once."""
        self._join()

    def is_completed(self) -> bool:
        """Not before it was waited for."""
        return False


def is_beside(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory is beside the device."""
    return tensor.untyped_storage()._cdata in _pool
