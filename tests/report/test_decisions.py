"""The decisions of a plan as tables."""

from __future__ import annotations

from dataclasses import replace

from merakc.report.decisions import plan_facts, plan_sections, stage_modules
from tests.report.test_text import tiny_plan


def test_rows_have_a_cell_for_each_column() -> None:
    sections = plan_sections(tiny_plan())
    assert [s.title for s in sections] == [
        "Stages",
        "Tensors over tp 2",
        "Parameters held by several stages",
        "tp collectives of a micro-batch",
        "Cut into 2 stages (load 1 is even)",
    ]
    for section in sections:
        assert section.rows
        assert {len(row) for row in section.rows} == {len(section.columns)}


def test_all_parameters_are_counted_once() -> None:
    plan = tiny_plan()
    tensors = plan_sections(plan)[1]
    assert sum(int(row[-1]) for row in tensors.rows) == len(plan.parameters)


def test_a_stage_has_the_modules_of_its_runs() -> None:
    assert stage_modules(tiny_plan(), 1) == "(model)\nlayers.2.attn .. lm_head"


def test_a_plan_that_nobody_simulated_predicts_nothing() -> None:
    assert "predicted" in dict(plan_facts(tiny_plan()))
    assert "predicted" not in dict(plan_facts(replace(tiny_plan(), prediction=None)))
