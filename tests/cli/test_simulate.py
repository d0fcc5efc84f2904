"""`merakc simulate`, as a shell sees it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from merakc.cli.app import app
from merakc.ir.plan_file import load_plan

SOURCE = "tests.small_source:small"
PLAN = ["plan", SOURCE, "--ranks", "4", "--batch", "16", "--cluster", "cpu", "--dp", "2", "--pp",
        "2", "--micro-batches", "4", "--schedule", "1f1b"]  # fmt: skip


def run(*arguments: str, code: int = 0) -> str:
    found = CliRunner().invoke(app, list(arguments))
    assert found.exit_code == code, found.output
    return found.stdout if code == 0 else found.output


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("plans") / "plan.json")
    run(*PLAN, "-o", path)
    return path


def test_both_sides_are_shown(file: str, tmp_path: Path) -> None:
    after = tmp_path / "after.json"
    asked = ("simulate", file, SOURCE, "--from", "cpu", "--batch", "32", "-o", str(after))
    printed = run(*asked)
    for text in ("before", "after", "step", "bubble", "peak memory", "dp 2 x tp 1 x pp 2"):
        assert text in printed
    assert "%" in printed
    assert load_plan(after).decisions.micro_batches == 8
    found = json.loads(run(*asked[:-2], "--json"))
    assert (found["before"]["batch"], found["after"]["batch"]) == (16, 32)
    plan = load_plan(file)
    assert plan.prediction is not None
    assert found["before"]["step_s"] == pytest.approx(plan.prediction.step_s)
    assert found["after"]["step_s"] > found["before"]["step_s"]
    other = json.loads(
        run("simulate", file, SOURCE, "--from", "cpu", "--cluster", "h100", "--json")
    )
    assert other["after"]["machines"] != other["before"]["machines"]


def test_the_machines_before_are_those_of_the_plan(file: str) -> None:
    plan = load_plan(file)
    assert plan.prediction is not None
    found = json.loads(run("simulate", file, SOURCE, "--json"))
    assert found["before"] == found["after"]
    assert found["before"]["step_s"] == pytest.approx(plan.prediction.step_s)
    bare = str(Path(file).with_name("bare.json"))
    replace(plan, report=None).save(bare)
    assert (
        json.loads(run("simulate", bare, SOURCE, "--json"))["before"]["machines"] == "H100, NVLink"
    )


def test_what_does_not_fit_is_exit_code_1(file: str, tmp_path: Path) -> None:
    tiny = tmp_path / "tiny.toml"
    tiny.write_text(
        'name = "tiny"\n'
        "[devices.small]\npeak_flops_per_s = { float32 = 1e12 }\nbytes_per_s = 1e11\n"
        "memory_bytes = 1000\n"
        '[[nodes]]\ndevice = "small"\ndevices = 8\n'
        '[[links]]\nname = "wire"\ndevices = 8\nbytes_per_s = 1e9\n'
    )
    printed = run("simulate", file, SOURCE, "--from", "cpu", "--cluster", str(tiny), code=1)
    assert "after: does not fit the 1000 B" in printed


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            ("--cluster", "moon"),
            "ClusterError: moon: cannot be read as a cluster file (No such file",
        ),
        (
            ("--cluster", "h100:1", "--dp", "16", "--batch", "64"),
            "32 ranks are asked for and it has 8 devices",
        ),
        (("--batch", "15"), "15 samples does not divide over dp=2"),
    ],
)
def test_what_cannot_be_used_is_one_message(options: tuple[str, ...], text: str, file: str) -> None:
    printed = run("simulate", file, SOURCE, *options, code=2)
    assert text in " ".join(printed.split())
    assert "Traceback" not in printed


def test_a_path_in_a_plan_is_not_opened(file: str, tmp_path: Path) -> None:
    pipe = tmp_path / "machines.toml"
    os.mkfifo(pipe)
    plan = load_plan(file)
    assert plan.report is not None
    other = str(tmp_path / "other.json")
    replace(plan, report=replace(plan.report, machines=str(pipe))).save(other)
    printed = run("simulate", other, SOURCE, code=2)
    assert "give that file with --from" in " ".join(printed.split())
    printed = run("simulate", other, SOURCE, "--from", str(pipe), code=2)
    assert "no regular file" in " ".join(printed.split())
    printed = run("simulate", file, SOURCE, "--dp", "1000000000", code=2)
    assert "give at most" in " ".join(printed.split())
