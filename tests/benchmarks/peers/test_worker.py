from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.peers.probe import Tape
from benchmarks.peers.worker import (
    RESET,
    RESET_PEAK,
    Rank,
    release_memory,
    resident_bytes,
    serve,
)
from tests.benchmarks.peers.comparing import TINY


class Recorder(Rank):
    """Answers without training."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def train(self, steps: int, muted: bool = False) -> dict[str, Any]:
        self.asked.append((steps, muted))
        return {"step_s": 0.5}


def test_each_command_is_answered_by_a_line() -> None:
    rank, answers = Recorder(), io.StringIO()
    commands = [["train", {"steps": 2}], ["train", {"steps": 1, "muted": True}]]
    serve(rank, io.StringIO("".join(json.dumps(c) + "\n" for c in commands)), answers)
    assert rank.asked == [(2, False), (1, True)]
    assert [json.loads(line) for line in answers.getvalue().splitlines()] == [{"step_s": 0.5}] * 2


def test_the_peak_of_memory_starts_anew() -> None:
    if not RESET.exists():
        pytest.skip("needs Linux's /proc")
    big = torch.ones(2**24)
    del big
    release_memory()
    now_bytes = resident_bytes("VmRSS")
    RESET.write_text(RESET_PEAK)
    assert resident_bytes("VmHWM") < now_bytes + 2**24
    held = torch.ones(2**24)
    assert resident_bytes("VmHWM") >= now_bytes + held.nbytes // 2
    assert resident_bytes("NoSuchField") == 0


class Untimed(Rank):
    """On no other rank that it would wait for."""

    def _timed(self, work: Callable[[], object]) -> tuple[float, float]:
        work()
        return 1.0, 1.0


class Takes:
    """Trains nothing, but takes some memory for each step."""

    dp_rank = 0

    def step(self, batch: Any) -> None:
        torch.ones(2**24)


def test_steps_answer_with_their_peak_of_memory() -> None:
    if not RESET.exists():
        pytest.skip("needs Linux's /proc")
    release_memory()
    base_bytes = resident_bytes("VmRSS")
    rank = Untimed(TINY, 0, Takes(), Tape(), None, base_bytes)  # type: ignore[arg-type]
    assert 2**26 <= rank.train(2)["peak_bytes"] + 2**22 < 2**27  # one step's, to a few pages
