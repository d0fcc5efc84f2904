from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

import pytest

from merakc.runtime.health.channel import Client, Hub, Line
from merakc.runtime.health.facts import ALL, Fault, State, Status
from merakc.runtime.health.judge import Judge
from merakc.runtime.health.meeting import connect, listen

HERE = Status(1, "model(...)", {ALL: "model(...)"}, State.IN)


class End:
    """What a rank says and hears."""

    def __init__(self) -> None:
        self.here, self.heard, self.ended = HERE, list[Any](), False
        self.rest = lambda: self.here, self.heard.append, lambda: self.ended

    def fault(self) -> Fault | None:
        return next((Fault.read(m["fault"]) for m in self.heard if "fault" in m), None)


def until(true: Callable[[], object], timeout_s: float = 60.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end_s
        time.sleep(0.005)


@contextmanager
def joined(timeout_s: float = 20.0) -> Iterator[tuple[End, Hub, End, Client]]:
    first, second = End(), End()
    listener = listen()
    hub = Hub(listener, "token", Judge(2, timeout_s, monotonic), *first.rest)
    hub.start()
    line = connect(["127.0.0.1"], listener.getsockname()[1], "token", 1)
    assert line is not None
    client = Client(line, 1, timeout_s, *second.rest)
    client.start()
    try:
        yield first, hub, second, client
    finally:
        client.close()
        hub.close()
        assert not client.is_alive()
        assert not hub.is_alive()


def test_ranks_agree_over_it() -> None:
    with joined() as (first, hub, second, client):
        asks = Status(2, "eval", {ALL: "eval"}, State.IN, asks=(ALL,))
        first.here = second.here = asks
        client.post(asks)
        hub.post(asks)
        until(lambda: {"agreed": 2} in first.heard and {"agreed": 2} in second.heard)


def test_a_closed_connection_is_seen_at_once() -> None:
    with joined() as (first, _, _, client):
        start_s = time.monotonic()
        client.line.sock.shutdown(socket.SHUT_RDWR)
        until(first.fault)
        assert time.monotonic() - start_s < 10  # of the 20 that a silent rank is waited for
        assert first.fault().ranks == (1,)  # type: ignore[union-attr]


def test_rank_0_may_be_the_one_that_is_lost() -> None:
    with joined() as (_, hub, second, _):
        hub.lines[1].sock.shutdown(socket.SHUT_RDWR)
        until(second.fault)
        assert second.fault().text.startswith("rank 0 was lost")  # type: ignore[union-attr]


def test_rank_0_may_leave() -> None:
    with joined() as (_, hub, second, client):
        hub.close()
        until(lambda: client.hub_ended is not None)
        assert second.fault() is None
        second.here = Status(2, "model(...)", {}, State.IN)
        until(second.fault)
        assert "rank 0 has ended" in second.fault().text  # type: ignore[union-attr]


def test_a_silent_rank_0_is_named() -> None:
    with joined(timeout_s=0.8) as (_, hub, second, _):
        hub.tick = lambda *, paused: None  # type: ignore[method-assign]
        until(second.fault)
        assert second.fault().text.startswith("rank 0 has not been heard of")  # type: ignore[union-attr]


def test_a_thread_ends_with_what_it_watches() -> None:
    with joined() as (first, hub, second, client):
        first.ended = second.ended = True
        until(lambda: not hub.is_alive() and not client.is_alive())
        assert first.fault() is None
        assert second.fault() is None


def test_a_copy_in_a_forked_process_is_dropped_and_tells_nobody() -> None:
    with joined() as (first, _, _, client):
        process = os.fork()
        if process == 0:
            client.drop()
            os._exit(0)
        os.waitpid(process, 0)
        time.sleep(0.2)
        assert first.fault() is None
        client.line.sock.shutdown(socket.SHUT_RDWR)
        until(first.fault)


def test_messages_come_in_pieces() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with pytest.MonkeyPatch.context() as patch, ours:
        patch.setattr(socket.socket, "setsockopt", lambda *_: None)
        line = Line(theirs)
        ours.sendall(b'{"a": 1}\n{"b"')
        assert list(line.read()) == [{"a": 1}]
        ours.sendall(b": 2}\n")
        assert list(line.read()) == [{"b": 2}]
        line.close()
