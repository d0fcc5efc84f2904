from __future__ import annotations

import multiprocessing
import os
import socket
import threading
import time
from multiprocessing.synchronize import Semaphore

import pytest
import torch
import torch.distributed as dist

from benchmarks.ranks import run_ranks
from merakc.runtime.health.sockets import Connections


def ended_wait(ended: Semaphore) -> tuple[str, float, bool]:
    with socket.create_server(("", 0)) as other:  # another socket of the process's
        connections = Connections()
        group = connections.made(lambda: dist.new_group([0, 1]))
        if dist.get_rank() == 1:
            ended.acquire(timeout=60)
            return "", 0.0, True
        timer = threading.Timer(0.2, connections.shut)
        timer.start()
        start_s = time.monotonic()
        with pytest.raises(RuntimeError) as caught:
            dist.all_reduce(torch.ones(1), group=group)
        seconds = time.monotonic() - start_s
        timer.join()
        ended.release()
        return str(caught.value), seconds, other.fileno() >= 0


def test_a_wait_ends_when_connections_are_shut() -> None:
    ended = multiprocessing.get_context("fork").Semaphore(0)
    (text, seconds, untouched), _ = run_ranks(2, ended_wait, ended)
    assert "closed by peer" in text
    assert seconds < 30  # of the 60 that the other holds it open
    assert untouched


def test_what_others_opened_is_left_alone() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connections = Connections()
        connections.shut()
        ours.send(b"x")
        assert theirs.recv(1) == b"x"
    assert os.getpid() > 0
