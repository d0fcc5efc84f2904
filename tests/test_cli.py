"""The command line, as a shell sees it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from merakc.cli import app
from merakc.ir.plan import load_plan

SMALL = ["plan", "tests.small_source:small", "--ranks", "2", "--batch", "8", "--cluster", "cpu"]


def run(*arguments: str, code: int = 0) -> str:
    found = CliRunner().invoke(app, list(arguments))
    assert found.exit_code == code, found.output
    return found.output


def test_plan_show_and_diff(tmp_path: Path) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    printed = run(*SMALL, "--tp", "2", "-o", str(first))
    assert "dp 1 x tp 2 x pp 1 = 2 ranks" in printed
    assert f"written to {first}" in printed.replace("\n", "")
    assert load_plan(first).tp == 2
    assert "dp 1 x tp 2 x pp 1" in run("show", str(first))
    assert json.loads(run("show", str(first), "--json"))["tp"] == 2
    options = ("--dp", "2", "--state-shards", "1,2,2", "--precision", "bf16-mixed")
    run(*SMALL, *options, "-o", str(second))
    assert str(load_plan(second).shards(0)) == "1, 2, 2"
    assert "decide the same" in run("diff", str(first), str(first))
    assert "precision" in run("diff", str(first), str(second), code=1)
    changes = json.loads(run("diff", str(first), str(second), "--json", code=1))["changes"]
    assert {"what": "tp", "first": "2", "second": "1"} in changes


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("show", "no.json"), "PlanError: no.json: not a readable plan"),
        ((*SMALL, "--cluster", "moon"), "ConfigError: cluster 'moon' is not known"),
        ((*SMALL, "--state-shards", "1,x,2"), "give zero-1 to zero-3, or three numbers"),
        ((*SMALL, "--precision", "fp8"), "precision 'fp8' is not known"),
        ((*SMALL, "--schedule", "best"), "schedule 'best' is not known"),
        ((*SMALL, "--dp", "2", "--batch", "3"), "3 samples does not divide over dp=2"),
    ],
)
def test_what_cannot_be_used_is_one_message(arguments: tuple[str, ...], text: str) -> None:
    printed = run(*arguments, code=2)
    assert text in " ".join(printed.split())
    assert "Traceback" not in printed


def test_a_plan_that_does_not_fit_says_so(tmp_path: Path) -> None:
    file = str(tmp_path / "big.json")
    printed = run("plan", "llama-3-8b", "--ranks", "1", "--batch", "1", "--seq", "128", "-o", file,
                  code=1)  # fmt: skip
    assert "does not fit: a rank needs" in printed
