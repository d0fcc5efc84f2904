"""What ranks of one machine talk over: its loopback, or links of a given rate.

A slow link is one in earnest: every rank lives in a network namespace of its own, joined to the
others by a bridge, and what leaves it passes a token bucket. That takes root and iproute2. TCP's
congestion control is Reno's, whichever the machine has: under BBR a pipeline's step over such links
took 280, 360, 436 or 510 ms, under Reno 290.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

BURST, LATENCY = "256kb", "50ms"  # smaller bursts take CPU from the ranks
MTU_BYTES = 9000
INTERFACE = "link0"
CONGESTION_CONTROL = "reno"  # which every kernel has, and lets every namespace choose


class NetworkError(RuntimeError):
    """The network cannot be made here, and why."""


@dataclass(frozen=True, slots=True)
class Network:
    """Where ranks are started; `namespaces` are theirs, none for the machine's own."""

    name: str
    interface: str
    namespaces: tuple[str, ...] = ()

    def enter(self, rank: int) -> list[str]:
        """What stands before a command so that it runs where the rank belongs."""
        return ["ip", "netns", "exec", self.namespaces[rank]] if self.namespaces else []


LOOPBACK = Network("loopback", "lo")


def network_of(ranks: int, name: str) -> AbstractContextManager[Network]:
    """The loopback, or links of the rate that the name is: see `slow_network`."""
    return nullcontext(LOOPBACK) if name == "loopback" else slow_network(ranks, name)


@contextmanager
def slow_network(ranks: int, rate: str, burst: str = BURST) -> Iterator[Network]:
    """Links of `rate` (as tc writes it: "1gbit") between so many ranks, while it lasts.

    An idle link lets `burst` bytes through at once.

    Raises `NetworkError` where there is no root, no iproute2, or no kernel support.
    """
    if os.geteuid():
        raise NetworkError("network namespaces take root")
    if not (shutil.which("ip") and shutil.which("tc")):
        raise NetworkError("ip and tc of iproute2 are missing")
    prefix = f"merakc-{os.getpid()}"
    hub, names = f"{prefix}-hub", tuple(f"{prefix}-{rank}" for rank in range(ranks))
    try:
        _ip("netns", "add", hub)
        _ip("-n", hub, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", hub, "link", "set", "bridge0", "up")
        for rank, name in enumerate(names):
            _join(hub, name, rank, rate, burst)
        yield Network(f"{rate} links", INTERFACE, names)
    finally:
        for name in (hub, *names):  # its links go with a namespace
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _join(hub: str, name: str, rank: int, rate: str, burst: str) -> None:
    """A namespace, and its cable to the bridge."""
    port = f"port{rank}"
    _ip("netns", "add", name)
    _ip("-n", hub, "link", "add", port, "mtu", str(MTU_BYTES), "type", "veth",
        "peer", "name", INTERFACE, "mtu", str(MTU_BYTES), "netns", name)  # fmt: skip
    _ip("-n", hub, "link", "set", port, "master", "bridge0", "up")
    _ip("-n", name, "link", "set", "lo", "up")
    _ip("-n", name, "addr", "add", f"10.111.0.{rank + 1}/24", "dev", INTERFACE)
    _ip("-n", name, "link", "set", INTERFACE, "up")
    setting = "/proc/sys/net/ipv4/tcp_congestion_control"
    _ip("netns", "exec", name, "sh", "-c", f"echo {CONGESTION_CONTROL} > {setting}")
    _run("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", "tbf",
         "rate", rate, "burst", burst, "latency", LATENCY)  # fmt: skip


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NetworkError(f"{' '.join(command)}: {done.stderr.strip()}")
