"""The memory beside a device: a pool that is counted apart."""

from __future__ import annotations

import torch

from merakc.runtime.host import _pool, brought_down, brought_up, is_beside
from merakc.runtime.live_bytes import LiveBytes


def pool_bytes() -> int:
    return sum(storage.nbytes() for storage in _pool.values())


def test_what_is_brought_down_is_a_copy_that_is_counted_apart() -> None:
    before, own = pool_bytes(), torch.arange(8.0)
    with LiveBytes([own]) as counted:
        there = brought_down(own, torch.float64)
    assert is_beside(there)
    assert is_beside(there[2:])
    assert not is_beside(own)
    assert torch.equal(there, own.double())
    assert (pool_bytes() - before, counted.peak_bytes) == (64, 32)
    del there
    assert pool_bytes() == before


def test_what_is_brought_up_is_in_the_devices_dtype() -> None:
    there, own = brought_down(torch.tensor([1.0, 2.5]), torch.float32), torch.empty(2).bfloat16()
    brought_up(own, there)
    assert own.tolist() == [1.0, 2.5]
