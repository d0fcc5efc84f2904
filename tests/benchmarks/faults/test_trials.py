"""Trials of `python -m benchmarks.faults`, of which each kind is one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.faults import trials
from benchmarks.faults.trials import Outcome, Trial, leftovers, shared
from benchmarks.faults.work import KINDS, Kind, plan_of


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    path.write_text(plan_of("tp2"))
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return shared()


def outcome(kind: Kind, plan: Path, slack_s: float = 10.0) -> Outcome:
    trial = Trial(kind, "tp2", plan, 3.0, slack_s, random.Random(0))
    while True:
        found = trial.poll()
        if found is not None:
            return found


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP", "exception of the user's"])
def test_a_fault_ends_all_ranks(name: str, plan: Path, folder: set[str]) -> None:
    kind = next(k for k in KINDS if k.name == name)
    found = outcome(kind, plan)
    assert not found.problems
    assert found.ended_s > 0
    assert not leftovers(folder)


def test_a_rank_that_goes_on_is_a_problem(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "BEYOND_S", -7.0)
    found = outcome(Kind("nothing", lambda run: None, waits=True), plan, 0.0)
    assert any("had not ended" in text for text in found.problems)


def test_an_error_is_to_name_the_rank() -> None:
    assert trials._names("rank 1 was lost", 1)
    assert trials._names("ranks 0, 1 went another way", 1)
    assert trials._names("'labels' is nothing on rank 1", 1)
    assert not trials._names("rank 1 was lost", 0)
    assert not trials._names("a rank was lost", 1)
    assert not trials._names("rank 12 was lost", 1)


def test_what_is_left_is_seen(tmp_path: Path, folder: set[str]) -> None:
    (tmp_path / "left").write_text("")
    assert leftovers(folder) == [str(tmp_path / "left")]
