from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.peers import rounds
from benchmarks.peers.crew import CrewError
from benchmarks.peers.networks import LOOPBACK
from benchmarks.peers.rounds import Course, Entry, Row, Visit, ratios
from benchmarks.peers.training import Training

FAST, SLOW = Entry("fast", "zero-1", "F"), Entry("slow", "zero-1", "S")


class FakeCrew:
    """Steps of a known length; `log` is who was asked for what."""

    log: list[str] = []  # noqa: RUF012  shared on purpose

    def __init__(self, peer: str, *_: Any, probe: bool, **__: Any) -> None:
        self.peer, self.probe = peer, probe

    def __enter__(self) -> FakeCrew:
        return self

    def __exit__(self, *_: object) -> None:
        self.log.append(f"{self.peer} closed")

    def close(self) -> None:
        self.log.append(f"{self.peer} closed")

    def answers(self) -> list[dict[str, Any]]:
        if self.peer == "broken":
            raise CrewError("it does not start")
        return [{}, {}]

    def ask(self, command: str, *, steps: int = 1, muted: bool = False) -> list[dict[str, Any]]:
        self.log.append(f"{self.peer} {command}")
        step_s = {"fast": 1.0, "slow": 1.5}[self.peer] - (0.25 if muted else 0.0)
        return [
            {"step_s": step_s - 0.1 * rank, "cpu_s": 0.0, "error": 1e-5, "alone_s": 0.5,
             "gradient_error": 1e-6, "peak_bytes": 7 + rank, "collectives": 3, "bytes": 12}
            for rank in range(2)
        ]  # fmt: skip


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    monkeypatch.setattr(rounds, "Crew", FakeCrew)
    monkeypatch.setattr(rounds, "cpu_busy_s", lambda: 0.0)
    FakeCrew.log.clear()
    yield FakeCrew.log
    FakeCrew.log.clear()


def test_contestants_take_turns_and_broken_ones_are_named(log: list[str]) -> None:
    parts: list[str] = []
    course = Course(Training(), {}, parts.append)
    broken = Entry("broken", "zero-1", "B")
    fast, slow, failed = course.measure(LOOPBACK, [FAST, SLOW, broken], rounds=3, steps=2)
    assert fast.steps_s == (1.0,) * 3
    assert slow.steps_s == (1.5,) * 3
    assert failed.failure == "it does not start"
    assert not failed.steps_s
    turns = [who.split()[0] for who in log if who.endswith("train")][6 : 6 + 6]
    assert turns == ["fast", "slow", "slow", "fast", "fast", "slow"]
    assert len(parts) == 3 + 6 + 2
    assert ratios(slow, fast) == (1.5, 1.5, 1.5)
    assert fast.hidden == pytest.approx(0.5)  # a quarter of a second exposed of half a one
    assert (fast.error, fast.collectives, fast.handed_bytes) == (1e-5, 3, 12)


def test_a_visit_is_repeated_while_others_are_busy(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = iter([0.0, 1e9, 0.0, 0.0, *[0.0] * 100])
    monkeypatch.setattr(rounds, "cpu_busy_s", lambda: next(busy))
    (row,) = Course(Training(), {}, lambda _: None).measure(LOOPBACK, [FAST], rounds=1, steps=2)
    assert row.others == 0.0
    assert log[5:7] == ["fast train", "fast train"]


def test_ratios_are_of_the_same_round() -> None:
    base = Row("n", FAST, steps_s=(1.0, 2.0, 1.0))
    assert ratios(replace(base, steps_s=(1.5, 3.0, 1.0)), base) == (1.5, 1.0, 1.5)


def test_busy_seconds_count_up() -> None:
    first = rounds.cpu_busy_s()
    assert sum(range(10**6)) > 0
    assert rounds.cpu_busy_s() >= first


def test_what_is_hidden_is_measured_on_demand_only(log: list[str]) -> None:
    course = Course(Training(), {}, lambda _: None)
    (row,) = course.measure(LOOPBACK, [FAST], rounds=2, steps=1, shares=False)
    assert (row.gradient_error, row.peak_bytes) == (1e-6, 8)
    assert "fast record" not in log
    assert log[-1] == "fast closed"


def test_a_contestant_that_fails_later_leaves_the_others(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Course._visit

    def visit(self: Course, crew: Any, steps: int, *, muted: bool = False) -> Visit:
        if crew.peer == "slow" and len(log) > 16:
            raise CrewError("it has stopped")
        return real(self, crew, steps, muted=muted)

    monkeypatch.setattr(Course, "_visit", visit)
    course = Course(Training(), {}, lambda _: None)
    fast, slow = course.measure(LOOPBACK, [FAST, SLOW], rounds=8, steps=1, shares=False)
    assert len(fast.steps_s) == 8
    assert slow.failure == "it has stopped"
    assert not slow.steps_s


def test_one_process_does_the_work_of_all() -> None:
    crews: list[Training] = []

    class Seen:
        def __init__(self, peer: str, form: str, training: Training, *_: Any, **__: Any) -> None:
            crews.append(training)

    training = Training(ranks=4, tp=2, micro_batches=2)
    course = Course(training, {}, lambda _: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "Crew", Seen)
        course.crew(replace(FAST, alone=True), LOOPBACK, probe=False)
        course.crew(FAST, LOOPBACK, probe=False)
    assert crews == [training.alone(), training]
