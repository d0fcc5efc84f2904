from __future__ import annotations

import io
import json
from typing import Any

from benchmarks.peers.worker import Rank, serve


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
