"""`merakc plan`: goals, and searches that are stopped. What it decides is in `test_app.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from merakc.cli.app import app
from merakc.cli.console import STOPPED
from merakc.ir.plan_file import load_plan
from merakc.planner import choose

ASKED = ["plan", "tests.small_source:small", "--ranks", "2", "--batch", "16", "--cluster", "h100"]


def run(*arguments: str, code: int = 0) -> str:
    found = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
    assert found.exit_code == code, found.output
    return found.output


def test_what_a_training_takes_is_told_by_plan_show_and_simulate(tmp_path: Path) -> None:
    file = str(tmp_path / "plan.json")
    goal = ("--tokens", "1G", "--price", "2")
    line = next(t for t in run(*ASKED, "-o", file, *goal).splitlines() if " a day; " in t)
    for text in ("1.00 G samples:", "days", "device-hours", "kWh of the devices", "to pay"):
        assert text in line
    assert line in run("show", file, *goal)
    printed = run("simulate", file, ASKED[1], *goal)
    assert all(text in printed for text in ("samples per day", "days", "price", "mfu"))


@pytest.mark.parametrize("stage", ["_planned", "_improved"])
def test_a_search_that_is_stopped_gives_the_best_so_far(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(choose, stage)

    def interrupted(*given: Any) -> Any:
        yield next(real(*given))
        raise KeyboardInterrupt

    file = tmp_path / "plan.json"
    monkeypatch.setattr(choose, stage, interrupted)
    assert "the search was stopped: others may be faster" in run(*ASKED, "-o", str(file))
    assert load_plan(file).prediction is not None


def test_a_search_that_is_stopped_before_it_has_planned_plans_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = choose.plan_layout, []

    def interrupted(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return real(*given)

    file = tmp_path / "plan.json"
    monkeypatch.setattr(choose, "plan_layout", interrupted)
    assert "the search was stopped: others may be faster" in run(*ASKED, "-o", str(file))
    assert load_plan(file).prediction is not None
    assert len(calls) == 2


def test_a_limit_ends_a_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(*_: Any) -> Any:
        while True:
            pass

    monkeypatch.setattr(choose, "_improved", endless)
    assert "the search was stopped: others may be faster" in run(
        *ASKED, "-o", str(tmp_path / "a.json"), "--limit", "8"
    )
    monkeypatch.setattr(choose, "find_candidates", endless)
    said = run(*ASKED, "-o", str(tmp_path / "b.json"), "--limit", "1", code=STOPPED)
    assert "stopped before there was anything to show" in said
