"""The benchmark's own small run, and that it sees what differs and what is refused."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from benchmarks.loops.cells import LOOPS, changed_lines, compared, program, references
from benchmarks.loops.job import Job
from merakc.errors import ConfigError

STEPS = 2
pytestmark = pytest.mark.filterwarnings("ignore")  # accelerate's own, on a CPU


def test_a_loop_is_that_of_one_process(tmp_path: Path) -> None:
    plain = references("Accelerate", STEPS, tmp_path)
    assert len([t for t in plain[0] if "loss" in t]) == STEPS
    cell = compared("Accelerate", "pp2", STEPS, plain)
    assert cell.passed, cell


def test_two_lines_of_each_are_changed() -> None:
    assert {loop: len(changed_lines(loop)) for loop in LOOPS} == dict.fromkeys(LOOPS, 2)


def refusing(_: Job) -> torch.nn.Module:
    raise ConfigError("not so")


def failing(_: Job) -> torch.nn.Module:
    raise ValueError("else")


def other(job: Job) -> torch.nn.Module:
    job.tell(step=1, loss=1.0)
    return torch.nn.Linear(1, 1)


def test_what_is_not_equal_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = [{"step": 1.0, "loss": 1.0 + 1e-9}] * 2, dict(torch.nn.Linear(1, 1).state_dict())
    found = []
    for run in (refusing, failing, other):
        monkeypatch.setattr(program("plain loop"), "run", run)
        with warnings.catch_warnings():
            found.append(compared("plain loop", "dp2", STEPS, plain))
    assert [(c.passed, bool(c.refused), bool(c.problem)) for c in found] == [
        (False, True, False), (False, False, True), (False, False, True),
    ]  # fmt: skip
    assert "not so" in found[0].refused
    assert "loss is 1.0 after step 1" in found[2].problem
