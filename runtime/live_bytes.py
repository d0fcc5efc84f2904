"""Counts the bytes that are alive while calls run: what a step needs at its highest point."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from merakc.kernels.host import ROOM
from merakc.runtime.host import is_beside


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the storages that calls make, until each is freed; `peak_bytes` is the most, of the
    host's memory `host_peak_bytes`.

    What lives beside the device does not count. torch's own `MemTracker` does the same by module,
    but only for a model called once a step.
    """

    def __init__(self, alive: Iterable[torch.Tensor]) -> None:
        """Starts from the tensors that are alive already."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.known: set[int] = set()
        self.now_bytes = self.peak_bytes = 0
        self.host_bytes = self.host_peak_bytes = 0
        for tensor in alive:
            self._add(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the call and counts what it made."""
        out = func(*args, **(kwargs or {}))
        given = {_key(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and _key(tensor) not in given:
                self._add(tensor, on_host=func is ROOM)
        return out

    def _add(self, tensor: torch.Tensor, *, on_host: bool = False) -> None:
        key, storage = _key(tensor), tensor.untyped_storage()
        if key in self.known or is_beside(tensor):
            return
        size = storage.nbytes()
        self.known.add(key)
        self._count(size, on_host=on_host)
        weakref.finalize(storage, self._freed, key, size, on_host)

    def _freed(self, key: int, size: int, on_host: bool) -> None:
        self.known.discard(key)
        self._count(-size, on_host=on_host)

    def _count(self, size: int, *, on_host: bool) -> None:
        if on_host:
            self.host_bytes += size
            self.host_peak_bytes = max(self.host_peak_bytes, self.host_bytes)
        else:
            self.now_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.now_bytes)


def _key(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key
