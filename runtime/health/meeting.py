"""How the ranks of a job find each other: by the store of their process group, and one address."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from time import monotonic

from torch._C._distributed_c10d import Store

from merakc.errors import MerakWarning, StuckError
from merakc.runtime.health.channel import WELCOME, Channel, Client, Handle, Hub, Line
from merakc.runtime.health.facts import Status
from merakc.runtime.health.judge import Judge

CONNECT_S = 3.0
_SIOCGIFADDR = 0x8915  # linux/sockios.h


def meet(
    store: Store,
    rank: int,
    size: int,
    timeout_s: float,
    status: Callable[[], Status],
    handle: Handle,
    over: Callable[[], bool],
) -> Channel | None:
    """This rank's end of a channel between all, which runs; all ranks at once, with a new store.

    None, with a warning, where some rank cannot reach rank 0. Raises `StuckError` for ranks that
    have not come after `timeout_s`.
    """
    _come(store, "here", rank, size, timeout_s)
    made: Channel | None = None
    if rank == 0:
        listener, token = listen(), secrets.token_hex(16)
        judge = Judge(size, timeout_s, monotonic)
        made = Hub(listener, token, judge, status, handle, over)
        made.start()
        place = _machine(), addresses(), listener.getsockname()[1], token
        store.set("place", json.dumps(place))
    _wait(store, {"place": 0}, rank, timeout_s)
    machine, places, port, token = json.loads(store.get("place"))
    if rank:
        near = ["127.0.0.1"] if machine == _machine() else []
        line = connect([*near, *places], port, token, rank)
        if line is None:
            store.set("alone", str(rank))
        else:
            made = Client(line, rank, timeout_s, status, handle, over)
            made.start()
    try:
        _come(store, "connected", rank, size, timeout_s)
    except StuckError:
        _close(made)
        raise
    if not store.check(["alone"]):
        return made
    _close(made)
    if rank == 0:
        lost = store.get("alone").decode()
        warnings.warn(
            f"rank {lost} does not reach rank 0 at {places}, port {port}: that a rank is lost is "
            f"seen after timeout_s={timeout_s:g} only, and not which",
            MerakWarning, stacklevel=6,
        )  # fmt: skip
    return None


def _close(made: Channel | None) -> None:
    if made is not None:
        made.close()


def _come(store: Store, what: str, rank: int, size: int, timeout_s: float) -> None:
    """Waits until all ranks have come so far."""
    keys = {f"{what} {each}": each for each in range(size)}
    store.set(f"{what} {rank}", "")
    _wait(store, keys, rank, timeout_s)


def _wait(store: Store, keys: Mapping[str, int], rank: int, timeout_s: float) -> None:
    """Waits for what ranks set. Raises `StuckError` for those that did not."""
    try:
        store.wait(list(keys), timedelta(seconds=timeout_s))
    except RuntimeError as error:
        absent = [r for key, r in keys.items() if not store.check([key])]
        names = ("rank " if len(absent) == 1 else "ranks ") + ", ".join(map(str, absent))
        raise StuckError(
            f"{names} did not come to auto_parallel within timeout_s={timeout_s:g} s, where rank "
            f"{rank} waits; every rank must call it"
        ) from error


def _machine() -> str:
    """What tells machines apart."""
    boot = ""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return f"{os.uname().nodename} {boot}"


def listen() -> socket.socket:
    """Where rank 0 waits for the others; on any address, at a port that is free."""
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def addresses() -> list[str]:
    """What this machine may be reached by from others, the likeliest first."""
    found = []
    for target in (os.environ.get("MASTER_ADDR", ""), "192.0.2.1"):  # of no machine: RFC 5737
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            if target:
                sock.connect((target, 9))  # sends nothing, and chooses an interface
                found.append(sock.getsockname()[0])
    found += _interfaces()
    with suppress(OSError):
        host = socket.gethostname()
        found += [i[4][0] for i in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    return list(dict.fromkeys(str(a) for a in found if str(a) != "127.0.0.1"))


def _interfaces() -> list[str]:
    """The IPv4 address of each interface, those first that process groups are told to use."""
    told = {os.environ.get(f"{name}_SOCKET_IFNAME", "") for name in ("GLOO", "NCCL", "TP")}
    names = sorted((name for _, name in socket.if_nameindex()), key=lambda name: name not in told)
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for name in names:
            with suppress(OSError):  # it has none
                asked = name.encode()[:15].ljust(256, b"\0")
                answer = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, asked)
                found.append(socket.inet_ntoa(answer[20:24]))
    return found


def connect(places: Sequence[str], port: int, token: str, rank: int) -> Line | None:
    """A line to rank 0, by the first of its addresses at which it answers; None if it does not."""
    for place in places:
        with suppress(OSError), ExitStack() as stack:
            sock = stack.enter_context(socket.create_connection((place, port), CONNECT_S))
            sock.sendall(json.dumps({"token": token, "rank": rank}).encode() + b"\n")
            if sock.recv(len(WELCOME), socket.MSG_WAITALL) == WELCOME:
                stack.pop_all()
                return Line(sock)
    return None
