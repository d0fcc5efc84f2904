"""`merakc verify`, as a shell sees it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from merakc.cli import verify as module
from merakc.cli.app import app
from merakc.equality.check import CheckResult, Row, check_plan
from merakc.ir.plan_file import load_plan
from merakc.report.terminal import QUIET

SOURCE = "tests.small_source:small"
PLAN = ["plan", SOURCE, "--ranks", "4", "--batch", "8", "--cluster", "cpu", "--dp", "2", "--tp",
        "2", "--state-shards", "1,2,2"]  # fmt: skip


def run(*arguments: str, code: int = 0) -> str:
    found = CliRunner().invoke(app, list(arguments))
    assert found.exit_code == code, found.output
    return found.output


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("plans") / "plan.json")
    run(*PLAN, "-o", path)
    return path


def test_a_right_plan_is_equal(
    file: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    results: list[CheckResult] = []
    monkeypatch.delenv(QUIET)

    def kept(*given: Any, **options: Any) -> CheckResult:
        results.append(check_plan(*given, **options))
        return results[-1]

    monkeypatch.setattr(module, "check_plan", kept)
    printed = run("verify", file, SOURCE, "--ranks", "2")
    assert "equal to one process" in printed
    assert "state shards 1, 2, 2" in printed
    assert "training on 2 local ranks, float64" in printed
    assert "is ready after" not in capfd.readouterr().err  # of the small model, on its ranks
    asked = Mock(return_value=results[0])  # the same, as another command shows it
    monkeypatch.setattr(module, "check_plan", asked)
    found = CliRunner().invoke(app, ["verify", file, SOURCE, "--json"])
    assert asked.call_args.kwargs["ranks"] == 8  # as many as there may be
    body = json.loads(found.stdout)
    assert body["equal"] is True
    assert body["checked"]["tp"] == 2
    assert body["checked"]["dp"] == 1
    assert body["replicas"]["dp"] == 2
    assert body["lost"] == []
    assert body["compared_with"] == "the plain model in one process, on the whole batch"
    assert {row["quantity"] for row in body["rows"]} == {"loss", "gradients", "weights"}


def test_what_differs_is_exit_code_1(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row("gradients", "float64", 1e-3, "gradient of step 0 of first.weight", 1e-10)
    plan = load_plan(file).decisions
    wrong = CheckResult(plan, 10, 10, {}, (), ("first.weight",), "the plain model", (row,), "", 1.0)
    monkeypatch.setattr(module, "check_plan", lambda *_, **__: wrong)
    printed = run("verify", file, SOURCE, code=1)
    assert "DIFFERENT from one process" in printed
    assert "1.0e-03" in printed
    assert "first.weight" in printed
    assert "along other dims than in the plan: 1 tensor (first.weight)" in printed
    assert "for want of ranks" not in printed
    apart = replace(wrong, checked=replace(plan, dp=1), replicas=replace(plan, tp=1))
    monkeypatch.setattr(module, "check_plan", lambda *_, **__: apart)
    words = " ".join(run("verify", file, SOURCE, code=1).split())
    assert re.search(r"checked dp 1 x tp 2 .* and, for want of ranks, dp 2 x tp 1 ", words)
    torn = replace(wrong, rows=(), failed="rank 1 failed: RuntimeError: torn")
    monkeypatch.setattr(module, "check_plan", lambda *_, **__: torn)
    assert "failed: rank 1 failed: RuntimeError: torn" in run("verify", file, SOURCE, code=1)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("no.json", SOURCE), "PlanError: no.json: cannot be read (No such file or directory)"),
        (("{file}", "tests.small_source:wide"), "the plan was made for another graph (Two)"),
        (("{file}", "tests.small_source:absent"), "ConfigError: tests.small_source:absent"),
    ],
)
def test_what_cannot_be_compared_is_one_message(
    arguments: tuple[str, ...], text: str, file: str
) -> None:
    printed = run("verify", *(a.format(file=file) for a in arguments), code=2)
    assert text in " ".join(printed.split())
    assert "Traceback" not in printed


def test_the_help_names_the_exit_codes(tmp_path: Path) -> None:
    assert "0 where they are equal" in " ".join(run("verify", "--help").split())
