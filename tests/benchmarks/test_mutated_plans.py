"""Damaged plan files: 1,000 here, 10,000 by `python -m benchmarks.mutated_plans`."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import mutated_plans
from benchmarks.mutated_plans import (
    OTHER,
    REFUSED,
    SAME,
    Mutant,
    error_of,
    judge,
    mutants,
    plans,
    rehashed,
)
from merakc.ir.plan import Plan
from merakc.ir.plan_file import PlanFile


def test_a_thousand_damaged_files_are_refused_or_sound() -> None:
    outcomes: Counter[tuple[bool, str]] = Counter()
    for mutant in mutants(1000, seed=1):
        outcome, found = judge(mutant)  # nothing but a MerakError is caught there
        assert outcome != OTHER or mutant.hashed, mutant
        if outcome == REFUSED:
            assert isinstance(found, str)
            assert len(found) < 1000, found
        outcomes[mutant.hashed, outcome] += 1
    assert outcomes[False, REFUSED] > 400
    assert outcomes[True, REFUSED] > 250
    assert outcomes[True, OTHER] > 0, "a hash that fits lets other sound plans pass"
    assert outcomes[False, SAME] + outcomes[True, SAME] > 0, "a prediction is no decision"


@pytest.mark.parametrize("number", range(6))
def test_what_is_not_damaged_is_the_same(number: int) -> None:
    file = plans()[number]
    assert judge(Mutant(number, file.text, False)) == (SAME, file.decisions)
    assert rehashed(json.loads(file.text)) == file.text


def test_another_sound_plan_trains_as_one_process_does() -> None:
    plan = replace(plans()[0].decisions, schedule="gpipe")
    outcome, found = judge(Mutant(0, PlanFile(plan).text, True))
    assert outcome == OTHER
    assert isinstance(found, Plan)
    assert error_of(found) < 1e-10


def test_a_fault_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    app = typer.Typer()
    app.command()(mutated_plans.main)
    arguments = ["--count", "4", "--train", "0"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "passed: 4 files, 0 faults" in done.output

    def torn(_: Mutant) -> None:
        raise KeyError("torn")

    monkeypatch.setattr(mutated_plans, "judge", torn)
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1
    assert "FAILED: 4 files, 4 faults" in done.output
