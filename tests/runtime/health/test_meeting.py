from __future__ import annotations

import socket
import threading
from datetime import timedelta
from time import monotonic

import pytest
import torch.distributed as dist

from merakc.errors import MerakWarning, StuckError
from merakc.runtime.health import meeting
from merakc.runtime.health.channel import Channel, Hub
from merakc.runtime.health.facts import Status
from merakc.runtime.health.judge import Judge
from merakc.runtime.health.meeting import addresses, connect, listen, meet


def met(size: int, ranks: int, timeout_s: float = 10.0) -> dict[int, Channel | Exception | None]:
    """What so many ranks of a job, each a thread here, get where they meet."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=timeout_s))
    found: dict[int, Channel | Exception | None] = {}

    def come(rank: int) -> None:
        try:
            found[rank] = meet(
                store, rank, size, timeout_s, Status, lambda message: None, lambda: False
            )
        except StuckError as error:
            found[rank] = error

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for end in found.values():
        if isinstance(end, Channel):
            end.close()
    return found


def test_all_ranks_meet() -> None:
    found = met(4, 4)
    assert isinstance(found[0], Hub)
    assert all(isinstance(end, Channel) for end in found.values())
    assert not [t for t in threading.enumerate() if t.name == "merakc-health"]


def test_who_does_not_come_is_named() -> None:
    for error in met(4, 3, timeout_s=0.5).values():
        assert str(error).startswith("rank 3 did not come to auto_parallel within timeout_s=0.5")


def test_rank_0_may_be_lost_before_it_can_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def die() -> socket.socket:
        raise StuckError("killed")

    monkeypatch.setattr(meeting, "listen", die)
    found = met(3, 3, timeout_s=0.5)
    assert all(str(found[r]).startswith("rank 0 did not come") for r in (1, 2))


def test_where_a_rank_is_not_reached_all_go_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "connect", lambda *_: None)
    with pytest.warns(MerakWarning, match="does not reach rank 0"):
        assert met(2, 2) == {0: None, 1: None}
    assert not [t for t in threading.enumerate() if t.name == "merakc-health"]


def test_strangers_are_not_let_in() -> None:
    listener = listen()
    port = listener.getsockname()[1]
    faults: list[object] = []
    judge = Judge(2, 20.0, monotonic)
    hub = Hub(listener, "token", judge, Status, faults.append, lambda: False)
    hub.start()
    assert connect(["127.0.0.1"], port, "guess", 1) is None
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(b"GET / HTTP/1.1\n")
        assert sock.recv(10) == b""
    assert not faults
    assert not hub.lines
    hub.close()


def test_addresses_are_those_that_others_may_reach() -> None:
    assert "127.0.0.1" not in addresses()
