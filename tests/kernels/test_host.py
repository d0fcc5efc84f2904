"""Copies to the host and back: the same values in the same layout."""

from __future__ import annotations

import pytest
import torch

from merakc.kernels.host import OnHost, moved_out, rest_of, start_back, start_out
from merakc.runtime.live_bytes import LiveBytes


@pytest.mark.parametrize("count", [1, 7, 24])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 0, 2)])
def test_a_value_comes_back_as_it_was(count: int, order: tuple[int, ...]) -> None:
    x = torch.arange(24.0).view(2, 3, 4).permute(order)
    host = moved_out(start_out(x, count), x)
    assert host.part.numel() == count
    rest = rest_of(x, count) if count < 24 else None
    found = start_back(host, rest).wait()
    assert torch.equal(found, x)
    assert found.stride() == x.stride()
    assert found.data_ptr() != x.data_ptr()


def test_what_is_not_dense_stays_where_it_is() -> None:
    x = torch.arange(24.0).view(4, 6)[:, :3]
    host: OnHost = moved_out(start_out(x, 6), x)
    assert start_back(host, rest_of(x, 6)).wait() is x


def test_the_host_is_counted_apart() -> None:
    x = torch.ones(1000)
    with LiveBytes([x]) as tracker:
        host = moved_out(start_out(x, 1000), x)
        assert (tracker.now_bytes, tracker.host_bytes) == (4000, 4000)
        back = start_back(host).wait()
        assert (tracker.now_bytes, tracker.host_bytes) == (8000, 4000)
        del host, back
        assert (tracker.now_bytes, tracker.host_bytes) == (4000, 0)
    assert tracker.host_peak_bytes == 4000
