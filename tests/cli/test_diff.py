"""`merakc diff` of a plan and its run, as a shell sees it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from merakc.cli.app import app
from merakc.ir.plan_file import Prediction
from tests.ir.test_ledger import HEADER, write
from tests.report.test_text import tiny_file


def run(*arguments: str, code: int = 0) -> str:
    found = CliRunner().invoke(app, ["diff", *arguments])
    assert found.exit_code == code, found.output
    return found.output


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, Path]:
    plan = tiny_file(Prediction(0.1, 0.2, (1000, 900)))
    plan.save(tmp_path / "plan.json")
    ledger = write(tmp_path / "run.jsonl", 5, replace(HEADER, plan=plan.hash))
    return str(tmp_path / "plan.json"), ledger


def test_a_run_is_shown_beside_its_plan(files: tuple[str, Path]) -> None:
    plan, ledger = files
    printed = run(plan, str(ledger))
    assert "the median of 3 measured steps" in printed
    assert "stage 0: forward" in printed
    assert "1.10" in printed
    found = json.loads(run(plan, str(ledger), "--json", "--skip", "0"))
    assert found["steps"] == 5
    assert found["rows"][0]["ratio"] == pytest.approx(1.1)


def test_what_cannot_be_read_is_one_message(files: tuple[str, Path], tmp_path: Path) -> None:
    plan, ledger = files
    assert "run more" in " ".join(run(plan, str(ledger), "--skip", "5", code=2).split())
    tiny_file().save(tmp_path / "same.json")
    tiny_file(dp=2).save(tmp_path / "other.json")
    printed = run(str(tmp_path / "other.json"), str(ledger), code=2)
    assert "LedgerError" in printed
    assert "Traceback" not in printed
    ledger.write_text(ledger.read_text()[:-9])
    assert "is cut off" in " ".join(run(plan, str(ledger), code=2).split())
