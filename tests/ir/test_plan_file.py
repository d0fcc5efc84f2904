"""Plan files: what is saved comes back, what was touched is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from merakc.errors import PlanError
from merakc.ir.plan_file import SCHEMA_VERSION, Measured, PlanFile, Prediction, load_plan
from tests.ir.test_plan import PLAN
from tests.report.made import report

FILE = PlanFile(
    PLAN,
    Prediction(0.25, 0.2, (100, 200)),
    Measured("plan ab on a cpu", ({"F": 0.1, "B": 0.2}, {}), (1e-4, 1e9), (2e-4, 5e8)),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "plan.json"


def _edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    body = json.loads(path.read_text())
    change(body)
    path.write_text(json.dumps(body))


@pytest.mark.parametrize("file", [FILE, PlanFile(PLAN)])
@pytest.mark.parametrize("with_report", [False, True])
def test_load_gives_back_what_was_saved(file: PlanFile, with_report: bool, path: Path) -> None:
    file = dataclasses.replace(file, report=report() if with_report else None)
    file.save(path)
    assert load_plan(path) == file
    assert load_plan(str(path)).hash == file.hash == PLAN.hash


def test_decisions_stand_beside_what_is_known_of_them(path: Path) -> None:
    FILE.save(path)
    body = json.loads(path.read_text())
    named = {"schema_version", "hash", "file_hash", "merakc_version"}
    assert set(body) == named | {"decisions", "prediction", "measured", "report"}
    assert set(body["decisions"]) == {field.name for field in dataclasses.fields(PLAN)}


def test_saving_twice_gives_the_same_file(path: Path) -> None:
    FILE.save(path)
    first = path.read_text()
    load_plan(path).save(path)
    assert path.read_text() == first


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body["decisions"].update(micro_batches=8),
        lambda body: body["decisions"]["splits"].update({"embed.weight": "8 x 4*"}),
        lambda body: body["decisions"]["stages"][0].update(last_node="linear"),
        lambda body: body.update(hash="0" * 64),
        lambda body: body.pop("hash"),
        lambda body: body["prediction"].update(step_s=0.1),
        lambda body: body["measured"]["seconds"][0].update(F=0.3),
        lambda body: body["report"]["timeline"].update(packed="x"),
        lambda body: body.update(also=1),
        lambda body: body.pop("file_hash"),
    ],
    ids=[
        "number",
        "layout",
        "stage",
        "hash",
        "no hash",
        "prediction",
        "measured",
        "report",
        "more",
        "no file hash",
    ],
)
def test_an_edited_file_is_refused(change: Callable[[dict[str, Any]], object], path: Path) -> None:
    dataclasses.replace(FILE, report=report()).save(path)
    _edit(path, change)
    with pytest.raises(PlanError, match=r"plan\.json: .*edited.*make the plan again"):
        load_plan(path)


@pytest.mark.parametrize("version", [SCHEMA_VERSION + 1, SCHEMA_VERSION - 1])
def test_another_schema_is_refused(version: int, path: Path) -> None:
    FILE.save(path)
    _edit(path, lambda body: body.update(schema_version=version))
    with pytest.raises(PlanError, match=f"schema version {version}, .* reads {SCHEMA_VERSION}"):
        load_plan(path)


def test_a_missing_field_is_named(path: Path) -> None:
    FILE.save(path)
    _edit(path, lambda body: body["decisions"].pop("splits"))
    with pytest.raises(PlanError, match=r"not a valid plan: (.|\n)*decisions.splits"):
        load_plan(path)


def test_a_key_that_stands_twice_is_refused(path: Path) -> None:
    FILE.save(path)
    path.write_text(path.read_text().replace('"tp": 2,', '"tp": 1,\n "tp": 2,', 1))
    with pytest.raises(PlanError, match="the key 'tp' stands there twice; keep one"):
        load_plan(path)


@pytest.mark.parametrize("ranks", [0, -1])
def test_a_report_that_cannot_be_is_refused(ranks: int, path: Path) -> None:
    made = report()
    made = dataclasses.replace(made, verdict=dataclasses.replace(made.verdict, ranks=ranks))
    dataclasses.replace(FILE, report=made).save(path)
    with pytest.raises(PlanError, match=r"report\.verdict\.ranks is .*; it must be above 0"):
        load_plan(path)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00"])
def test_what_is_no_plan_is_refused(text: str, path: Path) -> None:
    path.write_text(text)
    with pytest.raises(PlanError, match=r"plan\.json: not a"):
        load_plan(path)


def test_a_file_of_another_kind_is_refused(path: Path) -> None:
    path.write_text('{"nodes": []}')
    with pytest.raises(PlanError, match="not a plan file, it states no schema version; give"):
        load_plan(path)


def test_a_missing_file_is_refused(path: Path) -> None:
    with pytest.raises(
        PlanError, match=r"cannot be read \(No such .*\); give the file of a plan as merakc"
    ):
        load_plan(path)
