"""`merakc show --passes`: every pass that compiles a plan is told of."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.test_app import SMALL, run

MODEL = ["--passes", "tests.small_source:small"]


def test_what_each_pass_did_to_the_plans_model(tmp_path: Path) -> None:
    plan = str(tmp_path / "plan.json")
    run(*SMALL, "--pp", "2", "--overlap", "0", "-o", plan)
    rows = [line.split() for line in run("show", plan, *MODEL).splitlines()]
    found = {row[0]: row[1:] for row in rows if len(row) > 5}
    assert found["spmd-partition"][0] == found["differentiate"][0] == "2", "once for each stage"
    before, after = (int(n) for n in found["differentiate"][1:3])
    assert before < after
    assert list(found).index("roll-loops") < list(found).index("programs")
    effects = json.loads(run("show", plan, *MODEL, "--cluster", "h100", "--json"))
    made = [e for e in effects if e["name"] == "differentiate"]
    assert sum(e["before"]["nodes"] for e in made) == before
    assert all(0 < e["before"]["seconds"] < e["after"]["seconds"] for e in made)


def test_parts_of_micro_batches_are_told_of(tmp_path: Path) -> None:
    plan = str(tmp_path / "plan.json")
    run(*SMALL, "--tp", "2", "--overlap", "2", "-o", plan)
    effects = json.loads(run("show", plan, *MODEL, "--json"))
    divided = next(e for e in effects if e["name"] == "sub-batches")
    assert divided["before"]["nodes"] < divided["after"]["nodes"]


def test_another_model_is_refused(tmp_path: Path) -> None:
    plan = str(tmp_path / "plan.json")
    run(*SMALL, "-o", plan)
    said = run("show", plan, "--passes", "tests.small_source:wide", code=2)
    assert "another graph" in said
