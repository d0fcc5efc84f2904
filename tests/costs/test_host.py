"""Seconds and bytes of state on the host."""

from __future__ import annotations

from merakc.costs.host import HostUpdate, host_bytes, host_update, left_seconds
from merakc.costs.state import MIXED, Precision
from merakc.machines.links import Host

HOST = Host(10**9, bytes_per_s=28e9, down_bytes_per_s=4e9, up_bytes_per_s=1e9, latency_s=0.5)


def test_gradients_go_down_state_is_read_and_written_and_values_come_up() -> None:
    assert host_update(0, MIXED, HOST).total_s == 0
    # 4 bytes down, 2 x 12 + 4 read and written, 2 up.
    assert host_update(10**9, MIXED, HOST).total_s == (0.5 + 1.0) + 1.0 + (0.5 + 2.0)


def test_what_a_host_holds() -> None:
    assert host_bytes(10, MIXED) == 10 * (12 + 4)  # masters are among the 12
    assert host_bytes(10, Precision(8, 8, 16)) == 10 * (16 + 8 + 8)


def test_what_is_left_behind_a_step() -> None:
    one, other = HostUpdate(1.0, 2.0, 0.5), HostUpdate(1.0, 4.0, 0.5)
    # Updated from 11 to 13, and the other, which is down at 12, until 17.
    assert left_seconds([(12.0, other), (11.0, one)], step_s=15.0) == 2.0 + 1.0
    assert left_seconds([(11.0, one)], step_s=15.0) == 0.5
    assert left_seconds([(15.0, one), (15.0, other)], step_s=15.0) == 6.0 + 1.0  # as behind it
