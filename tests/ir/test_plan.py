"""Plan files: what is saved comes back, what was touched is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from merakc.errors import PlanError
from merakc.ir.plan import (
    SCHEMA_VERSION,
    CutReport,
    GraphId,
    Measured,
    Plan,
    Prediction,
    StageRun,
    load_plan,
)
from merakc.ir.program import Mesh
from tests.report.made import report

PLAN = Plan(
    model="Tiny",
    dp=1,
    tp=2,
    pp=2,
    batch_size=8,
    micro_batches=4,
    schedule="1f1b",
    recompute="none",
    graph=GraphId("ab12", (("embed", "01"), ("layers.0", "02"))),
    stages=(
        StageRun(0, "embedding", "add", "embed", "layers.0"),
        StageRun(1, "linear", "cross_entropy", "layers.1", "head"),
    ),
    parameters={"embed.weight": (0, 1), "head.bias": (1,)},
    splits={"embed.weight": "8* x 4"},
    collectives={"all_reduce": 4},
    cut=CutReport("program order", 1.02, 1.01, 4096, 1.10, 8192, 3),
    prediction=Prediction(0.25, 0.2, (100, 200)),
    measured=Measured("plan ab on a cpu", ({"F": 0.1, "B": 0.2}, {}), (1e-4, 1e9), (2e-4, 5e8)),
    merakc_version="0.1.0",
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "plan.json"


def _edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    body = json.loads(path.read_text())
    change(body)
    path.write_text(json.dumps(body))


@pytest.mark.parametrize("plan", [PLAN, dataclasses.replace(PLAN, prediction=None)])
@pytest.mark.parametrize("with_report", [False, True])
def test_load_gives_back_what_was_saved(plan: Plan, with_report: bool, path: Path) -> None:
    plan = dataclasses.replace(plan, report=report() if with_report else None)
    plan.save(path)
    assert load_plan(path) == plan
    assert load_plan(str(path)).hash == plan.hash


def test_saving_twice_gives_the_same_file(path: Path) -> None:
    PLAN.save(path)
    first = path.read_text()
    load_plan(path).save(path)
    assert path.read_text() == first


def test_the_mesh_is_that_of_the_degrees() -> None:
    assert PLAN.mesh == Mesh(dp=1, tp=2, pp=2)


def test_the_hash_covers_every_decision_and_no_prediction() -> None:
    assert dataclasses.replace(PLAN, prediction=None).hash == PLAN.hash
    assert dataclasses.replace(PLAN, measured=None).hash == PLAN.hash
    assert dataclasses.replace(PLAN, report=report()).hash == PLAN.hash
    others = [
        dataclasses.replace(PLAN, micro_batches=8),
        dataclasses.replace(PLAN, stages=PLAN.stages[::-1]),
        dataclasses.replace(PLAN, graph=GraphId("ab13", PLAN.graph.modules)),
        dataclasses.replace(PLAN, splits={"embed.weight": "8 x 4*"}),
    ]
    assert len({PLAN.hash, *(plan.hash for plan in others)}) == 5


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.update(micro_batches=8),
        lambda body: body["splits"].update({"embed.weight": "8 x 4*"}),
        lambda body: body["stages"][0].update(last_node="linear"),
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
    dataclasses.replace(PLAN, report=report()).save(path)
    _edit(path, change)
    with pytest.raises(PlanError, match=r"plan\.json: .*edited.*make the plan again"):
        load_plan(path)


@pytest.mark.parametrize("version", [SCHEMA_VERSION + 1, None])
def test_another_schema_is_refused(version: int | None, path: Path) -> None:
    PLAN.save(path)
    _edit(path, lambda body: body.update(schema_version=version))
    with pytest.raises(PlanError, match=f"schema version {version}, .* reads {SCHEMA_VERSION}"):
        load_plan(path)


def test_a_missing_field_is_named(path: Path) -> None:
    PLAN.save(path)
    _edit(path, lambda body: body.pop("micro_batches"))
    with pytest.raises(PlanError, match=r"not a valid plan: (.|\n)*micro_batches"):
        load_plan(path)


def test_a_key_that_stands_twice_is_refused(path: Path) -> None:
    PLAN.save(path)
    path.write_text(path.read_text().replace('"tp": 2,', '"tp": 1,\n "tp": 2,', 1))
    with pytest.raises(PlanError, match="the key 'tp' stands there twice; keep one"):
        load_plan(path)


@pytest.mark.parametrize("ranks", [0, -1])
def test_a_report_that_cannot_be_is_refused(ranks: int, path: Path) -> None:
    made = report()
    made = dataclasses.replace(made, verdict=dataclasses.replace(made.verdict, ranks=ranks))
    dataclasses.replace(PLAN, report=made).save(path)
    with pytest.raises(PlanError, match=r"report\.verdict\.ranks is .*; it must be above 0"):
        load_plan(path)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00"])
def test_what_is_no_plan_is_refused(text: str, path: Path) -> None:
    path.write_text(text)
    with pytest.raises(PlanError, match=r"plan\.json: not a"):
        load_plan(path)


def test_a_missing_file_is_refused(path: Path) -> None:
    with pytest.raises(
        PlanError, match=r"not a readable plan file .*; give the file of a plan as merakc"
    ):
        load_plan(path)
