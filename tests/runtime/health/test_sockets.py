from __future__ import annotations

import os
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist

from benchmarks.ranks import run_ranks
from merakc.runtime.health.sockets import Connections


def ended_wait() -> tuple[str, float, bool]:
    with socket.create_server(("", 0)) as other:  # another socket of the process's
        connections = Connections()
        group = connections.made(lambda: dist.new_group([0, 1]))
        if dist.get_rank() == 1:
            time.sleep(1.0)
            return "", 0.0, True
        timer = threading.Timer(0.2, connections.shut)
        timer.start()
        start_s = time.monotonic()
        with pytest.raises(RuntimeError) as caught:
            dist.all_reduce(torch.ones(1), group=group)
        timer.join()
        return str(caught.value), time.monotonic() - start_s, other.fileno() >= 0


def test_a_wait_ends_when_connections_are_shut() -> None:
    (text, seconds, untouched), _ = run_ranks(2, ended_wait)
    assert "closed by peer" in text
    assert seconds < 0.9
    assert untouched


def test_what_others_opened_is_left_alone() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connections = Connections()
        connections.shut()
        ours.send(b"x")
        assert theirs.recv(1) == b"x"
    assert os.getpid() > 0
