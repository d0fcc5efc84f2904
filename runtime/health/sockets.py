"""The connections of process groups, so that a wait for a rank that is lost can be ended.

gloo waits in C++, where no signal and no exception of Python's comes, and its own abort does
nothing. A connection that is shut down ends every wait for it, in milliseconds.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from weakref import WeakSet

import torch
import torch.distributed as dist

_OPEN = "/proc/self/fd"


class Connections:
    """Those of the groups that were made through it."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.groups: WeakSet[dist.ProcessGroup] = WeakSet()

    def made(self, make: Callable[[], dist.ProcessGroup]) -> dist.ProcessGroup:
        """Makes a group, and notes the connections that it opens."""
        before = _sockets().keys()
        group = make()
        self.names |= _sockets().keys() - before
        if isinstance(group, dist.ProcessGroup):  # it is a number where this rank is not in it
            self.groups.add(group)
        return group

    def shut(self) -> None:
        """Ends whatever waits in these groups, with a RuntimeError there."""
        for name, file in _sockets().items():
            if name in self.names:
                with suppress(OSError), socket.socket(fileno=os.dup(file)) as sock:
                    sock.getpeername()  # raises for one that waits for connections
                    sock.shutdown(socket.SHUT_RDWR)
        for group in list(self.groups):
            with suppress(Exception):  # only NCCL's has one on this device, and aborts
                group._get_backend(torch.device("cuda")).abort()


def _sockets() -> dict[str, int]:
    """The open sockets of this process by names that are not used again, where it can be asked."""
    found: dict[str, int] = {}
    with suppress(OSError):
        for file in os.listdir(_OPEN):
            with suppress(OSError):
                name = os.readlink(f"{_OPEN}/{file}")
                if name.startswith("socket:"):
                    found[name] = int(file)
    return found
