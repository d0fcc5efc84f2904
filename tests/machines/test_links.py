"""What joins devices, and what they have of their host."""

from __future__ import annotations

import pytest

from merakc.machines.links import Host, Link


def test_a_message_waits_and_travels() -> None:
    assert Link(1e-5, 1e9).seconds(1e6) == pytest.approx(1e-5 + 1e-3)


def test_devices_of_a_node_share_the_way_to_their_host() -> None:
    host = Host(1 << 30, 4e10, 2e10, 1e10, latency_s=1e-5, shared_by=2)
    alone, together = host.among(1), host.among(8)
    assert (alone.down, alone.up) == (Link(1e-5, 2e10), Link(1e-5, 1e10))
    assert (together.down, together.up) == (Link(1e-5, 1e10), Link(1e-5, 5e9))
    assert together.among(8) == together  # once
    assert (together.memory_bytes, together.bytes_per_s) == (1 << 30, 4e10)
