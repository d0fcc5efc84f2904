"""What runs aside: reductions on streams are started at once, and in the order of the calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from merakc.runtime.streams import Running, stand_in, streams_of

CPU = torch.device("cpu")


class Told:
    """Writes down what a device is told."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lines: list[str] = []

    @contextmanager
    def aside(self) -> Iterator[None]:
        self.lines.append("aside")
        yield
        self.lines.append("back")

    def mark(self) -> int:
        return len(self.lines)

    def join(self, mark: int) -> None:
        self.lines.append(f"join {mark}")


class Work:
    def __init__(self, name: str, lines: list[str]) -> None:
        self.name, self.lines = name, lines
        lines.append(f"start {name}")

    def is_completed(self) -> bool:
        raise AssertionError("nobody asks a device")

    def wait(self) -> None:
        self.lines.append(f"wait {self.name}")


def test_a_stand_in_is_there_while_it_is_entered() -> None:
    assert streams_of(CPU) is None
    with stand_in("cpu", Told):
        assert isinstance(streams_of(CPU), Told)
        assert streams_of(CPU) is streams_of(CPU)
    assert streams_of(CPU) is None


def test_all_steps_start_at_once_aside_and_computing_waits_where_they_are_finished() -> None:
    streams = Told(CPU)
    running = Running(streams)
    value = torch.ones(2)

    def steps() -> Iterator[Work]:
        assert running.lend(value) is value
        yield Work("one", streams.lines)
        yield Work("two", streams.lines)

    running.start(steps())  # type: ignore[arg-type]
    started = ["aside", "start one", "wait one", "start two", "wait two", "back"]
    assert streams.lines == started
    assert not running.poll()
    assert running.read == [value]
    running.finish()
    assert streams.lines == [*started, "join 6"]
    assert running.poll()
    assert running.read == []
