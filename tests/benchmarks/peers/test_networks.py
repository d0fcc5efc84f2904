from __future__ import annotations

import os
import subprocess

import pytest

from benchmarks.peers.networks import INTERFACE, LOOPBACK, NetworkError, slow_network

CONTROL = "/proc/sys/net/ipv4/tcp_congestion_control"


def _namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


def test_the_loopback_takes_nothing() -> None:
    assert LOOPBACK.enter(3) == []


def test_a_slow_network_is_one_and_goes_again() -> None:
    try:
        with slow_network(3, "300mbit") as network:
            for rank in range(3):
                command = [*network.enter(rank), "tc", "qdisc", "show", "dev", INTERFACE]
                shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                assert "tbf" in shown
                assert "rate 300Mbit" in shown
                command = [*network.enter(rank), "cat", CONTROL]
                shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                assert shown == "reno\n"
            assert f"merakc-{os.getpid()}-2" in _namespaces()
    except NetworkError as error:
        pytest.skip(str(error))
    assert f"merakc-{os.getpid()}" not in _namespaces()


def test_a_rate_that_is_none_leaves_nothing_behind() -> None:
    with pytest.raises(NetworkError), slow_network(2, "fast"):
        pass
    if not os.geteuid():
        assert f"merakc-{os.getpid()}" not in _namespaces()


def test_it_takes_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NetworkError, match="root"), slow_network(2, "1gbit"):
        pass
