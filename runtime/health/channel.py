"""Small messages between the ranks, through rank 0: lines of JSON, each rank's thread at one end.

A closed connection says at once that a process has ended, and beats that stay away that one is
stopped. Nothing is sent for a step; a rank that wants to know whether all others have come asks.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from time import monotonic
from typing import Any

from merakc.runtime.health.facts import Fault, Status
from merakc.runtime.health.judge import Judge, Message, lost, silence

TICK_S = 0.5
# A thread that came so much later to its next beat stood still, with its process.
PAUSED_S = 2.0
WELCOME = b'"welcome"\n'

Handle = Callable[[Message], None]


class Line:
    """One connection, over which messages go as lines."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        self.sock, self.left, self.lock = sock, b"", threading.Lock()

    def send(self, message: object) -> None:
        """Sends one message; drops it where the other end takes nothing, or has gone."""
        data = json.dumps(message).encode() + b"\n"
        with self.lock, suppress(OSError):
            sent = self.sock.send(data)
            if sent < len(data):  # half a line: the other end has stood still for very long
                self.sock.shutdown(socket.SHUT_RDWR)

    def read(self) -> Iterator[dict[str, Any]]:
        """The messages that are there. Raises `ConnectionError` where no more will come."""
        try:
            data = self.sock.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError as error:
            raise ConnectionError(str(error)) from error
        *lines, self.left = (self.left + data).split(b"\n")
        for line in lines:
            yield json.loads(line)
        if not data:
            raise ConnectionError("closed")

    def close(self) -> None:
        """Lets go of this end."""
        with self.lock:
            self.sock.close()


class Channel(threading.Thread):
    """A rank's end. `status` says where the rank is, `handle` is told what comes: `agreed` and
    `pending` with a call, `fault`. `over` says whether there is nothing to watch any more.
    """

    def __init__(
        self, status: Callable[[], Status], handle: Handle, over: Callable[[], bool]
    ) -> None:
        super().__init__(name="merakc-health", daemon=True)
        self.status, self.handle, self.over = status, handle, over
        self.selector = selectors.DefaultSelector()
        self.closing = False
        self.beat_s = monotonic()
        self.woken, self.waker = socket.socketpair()
        for end in (self.woken, self.waker):
            end.setblocking(False)
        self.selector.register(self.woken, selectors.EVENT_READ)

    def post(self, status: Status) -> None:
        """Says now where this rank is; from any thread."""
        raise NotImplementedError

    def say_dying(self, text: str) -> None:
        """Says which error ends this rank."""
        raise NotImplementedError

    def goodbye(self) -> None:
        """Says that this rank leaves, which is nothing wrong."""
        raise NotImplementedError

    def sockets(self) -> list[socket.socket]:
        """All that are open."""
        return [self.woken, self.waker]

    def wake(self) -> None:
        """Has the thread look again."""
        with suppress(OSError):
            self.waker.send(b"x")

    def close(self) -> None:
        """Leaves; the thread ends."""
        if not self.closing:
            self.goodbye()
            self.closing = True
            self.wake()
        if threading.current_thread() is not self:
            self.join(2.0)

    def drop(self) -> None:
        """In a process that was forked from a rank: closes this copy of the connections."""
        self.closing = True
        for sock in self.sockets():
            with suppress(OSError):
                os.close(sock.detach())

    def run(self) -> None:
        """Beats, and hands on what comes, until there is nothing to watch."""
        try:
            while not self.closing:
                for key, _ in self.selector.select(self.wait_s()):
                    if key.fileobj is self.woken:
                        with suppress(BlockingIOError):
                            self.woken.recv(4096)
                    else:
                        self.ready(key)
                self.tend()
                now = monotonic()
                if now >= self.beat_s + TICK_S:
                    paused = now > self.beat_s + TICK_S + PAUSED_S
                    self.beat_s = now
                    self.tick(paused=paused)
                    if self.over():
                        self.goodbye()
                        self.closing = True
        finally:
            self.selector.close()
            for sock in self.sockets():
                sock.close()

    def wait_s(self) -> float:
        """Seconds until something is to be done."""
        return max(0.0, self.beat_s + TICK_S - monotonic())

    def ready(self, key: selectors.SelectorKey) -> None:
        """Something has come."""
        raise NotImplementedError

    def tend(self) -> None:
        """What is to be done between beats."""

    def tick(self, *, paused: bool) -> None:
        """A beat; `paused` where this process itself stood still before it."""
        raise NotImplementedError


class Hub(Channel):
    """Rank 0's end, where the judge sits."""

    def __init__(self, listener: socket.socket, token: str, judge: Judge, *rest: Any) -> None:
        super().__init__(*rest)
        listener.setblocking(False)
        self.listener, self.token, self.judge = listener, token, judge
        self.lines: dict[int, Line] = {}
        self.strangers: list[Line] = []
        self.lock = threading.RLock()
        self.selector.register(listener, selectors.EVENT_READ)
        self.told = False  # all ranks of the fault

    def sockets(self) -> list[socket.socket]:
        """All that are open."""
        lines = [*self.lines.values(), *self.strangers]
        return [*super().sockets(), self.listener, *(line.sock for line in lines)]

    def post(self, status: Status) -> None:
        """Says now where this rank is."""
        with self.lock:
            self.judge.hear(0, status)
            self.deliver()
        self.wake()

    def say_dying(self, text: str) -> None:
        """Says which error ends this rank."""
        self._all({"dying": text})

    def goodbye(self) -> None:
        """Says that this rank leaves."""
        self._all({"bye": told(self.status())})

    def wait_s(self) -> float:
        """Seconds until something is to be done."""
        with self.lock:
            return min(super().wait_s(), self.judge.due_s())

    def tend(self) -> None:
        """What the judge wants to look at between beats."""
        with self.lock:
            if self.judge.due_s() <= 0:
                self.judge.look()
                self.deliver()

    def ready(self, key: selectors.SelectorKey) -> None:
        """Something has come."""
        if key.fileobj is self.listener:
            with suppress(OSError):
                line = Line(self.listener.accept()[0])
                self.strangers.append(line)
                self.selector.register(line.sock, selectors.EVENT_READ, [line, -1])
            return
        line, rank = key.data
        try:
            for message in line.read():
                if rank < 0:
                    rank = key.data[1] = self._welcome(line, message)
                else:
                    self._hear(rank, message)
        except (ConnectionError, ValueError, KeyError, TypeError):
            self.selector.unregister(line.sock)
            line.close()
            if line in self.strangers:
                self.strangers.remove(line)
            if rank > 0:
                with self.lock:
                    self.lines.pop(rank, None)
                    self.judge.gone(rank)
                    self.deliver()

    def _welcome(self, line: Line, message: dict[str, Any]) -> int:
        """The rank that says hello with the token of this job."""
        if not secrets.compare_digest(str(message["token"]), self.token):
            raise ConnectionError("a stranger")
        rank = int(message["rank"])
        self.strangers.remove(line)
        self.lines[rank] = line
        line.send("welcome")
        return rank

    def _hear(self, rank: int, message: dict[str, Any]) -> None:
        with self.lock:
            if "dying" in message:
                self.judge.seen[rank].text = str(message["dying"])
            elif "bye" in message:
                text = self.judge.seen[rank].text
                self.judge.end(rank, Status.read(message["bye"]), text)
            else:
                self.judge.hear(rank, Status.read(message))
            self.deliver()

    def tick(self, *, paused: bool) -> None:
        """Beats to all, and looks who is missing."""
        with self.lock:
            if paused:
                self.judge.paused()
            here = self.status()
            self.judge.hear(0, here)
            self.judge.look()
            self.deliver()
        self._all({"beat": told(here)})

    def deliver(self) -> None:
        """Hands out what the judge has to say."""
        while self.judge.out:
            rank, message = self.judge.out.pop(0)
            if rank == 0:
                self.handle(message)
            elif rank in self.lines:
                self.lines[rank].send(message)
        fault = self.judge.fault
        if fault is not None and not self.told:
            self.told = True
            message = {"fault": fault.told()}
            self._all(message)
            self.handle(message)

    def _all(self, message: object) -> None:
        for line in list(self.lines.values()):
            line.send(message)


class Client(Channel):
    """The end of any other rank. Where rank 0 is silent, it says so itself."""

    def __init__(self, line: Line, rank: int, timeout_s: float, *rest: Any) -> None:
        super().__init__(*rest)
        self.line, self.rank, self.timeout_s = line, rank, timeout_s
        self.heard_s = monotonic()
        self.hub_seen = Status()  # where rank 0 was last
        self.hub_text = ""  # the error that ends rank 0
        self.hub_ended: Status | None = None
        self.selector.register(line.sock, selectors.EVENT_READ)

    def sockets(self) -> list[socket.socket]:
        """All that are open."""
        return [*super().sockets(), self.line.sock]

    def post(self, status: Status) -> None:
        """Says now where this rank is."""
        self.line.send(told(status))

    def say_dying(self, text: str) -> None:
        """Says which error ends this rank."""
        self.line.send({"dying": text})

    def goodbye(self) -> None:
        """Says that this rank leaves."""
        self.line.send({"bye": told(self.status())})

    def ready(self, key: selectors.SelectorKey) -> None:
        """Something has come."""
        try:
            for message in self.line.read():
                self.heard_s = monotonic()
                if "bye" in message:
                    self.hub_ended = Status.read(message["bye"])
                    self.look()
                elif "dying" in message:
                    self.hub_text = str(message["dying"])
                elif "beat" in message:
                    self.hub_seen = Status.read(message["beat"])
                else:
                    self.handle(message)
        except (ConnectionError, ValueError):
            self.selector.unregister(self.line.sock)
            if self.hub_ended is None:
                self.blame(lost(self.hub_text, self.hub_seen))

    def tick(self, *, paused: bool) -> None:
        """A beat."""
        if paused:
            self.heard_s = monotonic()
        self.post(self.status())
        self.look()

    def look(self) -> None:
        """Whether rank 0 is missing."""
        here, gone = self.status(), self.hub_ended
        if gone is not None:
            if here.call > gone.call:
                how = f"ended with {self.hub_text}" if self.hub_text else "has ended"
                self.blame(f"{how}, {gone.words()}")
        elif monotonic() > self.heard_s + self.timeout_s:
            self.blame_silence()

    def blame_silence(self) -> None:
        """Says that rank 0 is silent."""
        self.blame(silence(monotonic() - self.heard_s, self.hub_seen))

    def blame(self, text: str) -> None:
        """Says what is wrong with rank 0."""
        self.handle({"fault": Fault((0,), f"rank 0 {text}").told()})


def told(status: Status) -> Message:
    """A status as it is sent."""
    return {name: getattr(status, name) for name in Status.__slots__}
