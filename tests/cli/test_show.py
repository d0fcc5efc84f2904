"""`merakc show`, as a shell sees it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from merakc.ir.plan_file import load_plan
from tests.cli.test_app import SMALL, run


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("plan") / "plan.json")
    run(*SMALL, "--pp", "2", "-o", path)
    return path


def test_show_writes_a_page_a_timeline_and_a_picture(plan: str, tmp_path: Path) -> None:
    page, trace, picture = (str(tmp_path / n) for n in ("page.html", "trace.json", "step.png"))
    text = run("show", plan)
    assert " a step, MFU " in text.splitlines()[0]
    for title in ("Schedule", "Communication in a step", "What takes longest", "small_source.py"):
        assert title in text
    printed = run("show", plan, "--html", page, "--trace", trace, "--png", picture)
    assert "MFU" not in printed
    assert printed.count("written to") == 3
    assert "<!doctype html>" in Path(page).read_text()
    assert len(json.loads(Path(trace).read_text())["traceEvents"]) > 20
    assert Path(picture).read_bytes().startswith(b"\x89PNG")


def test_show_of_a_plan_without_a_report_tells_the_decisions(plan: str, tmp_path: Path) -> None:
    bare = tmp_path / "bare.json"
    replace(load_plan(plan), report=None).save(bare)
    assert json.loads(run("show", str(bare), "--json"))["hash"] == load_plan(plan).hash
    assert "dp 1 x tp 1 x pp 2" in run("show", str(bare))
    run("show", str(bare), "--html", str(tmp_path / "page.html"))
    assert "dp 1 x tp 1 x pp 2" in (tmp_path / "page.html").read_text()
    printed = run("show", str(bare), "--trace", str(tmp_path / "step.json"), code=2)
    assert "made without a report" in " ".join(printed.split())


def test_show_says_what_it_cannot_write(plan: str, tmp_path: Path) -> None:
    printed = run("show", plan, "--html", str(tmp_path / "no" / "page.html"), code=2)
    assert "give another path" in " ".join(printed.split())
    printed = run("show", plan, "--png", str(tmp_path / "step.doc"), code=2)
    assert "must end with one of .png" in " ".join(printed.split())


def test_a_timeline_that_cannot_be_read_is_one_message(plan: str, tmp_path: Path) -> None:
    file, made = tmp_path / "changed.json", load_plan(plan)
    assert made.report is not None
    packed = replace(made.report.timeline, packed="AAAA")
    replace(made, report=replace(made.report, timeline=packed)).save(file)
    for options in ((), ("--png", str(tmp_path / "step.png"))):
        assert "the plan's timeline cannot be read" in " ".join(
            run("show", str(file), *options, code=2).split()
        )
