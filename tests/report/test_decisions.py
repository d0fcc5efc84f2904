"""The decisions of a plan as tables."""

from __future__ import annotations

from dataclasses import replace

from merakc.report.decisions import plan_facts, plan_sections, stage_modules
from tests.report.made import report
from tests.report.test_text import CUT, tiny_file, tiny_plan


def test_rows_have_a_cell_for_each_column() -> None:
    calls = {"layers.*.attn at model.py:7": 3}
    told = replace(report(), collectives={"all_reduce": 16}, exchanged=calls, rings=calls, cut=CUT)
    sections = plan_sections(replace(tiny_file(), report=told))
    assert [s.title for s in sections] == [
        "Stages",
        "Tensors over tp 2",
        "Parameters held by several stages",
        "tp collectives of a micro-batch",
        "Sequences exchanged for heads: calls on all of a sequence, with parts of the heads",
        "Keys and values passed around: calls on blocks of a sequence, one after the other",
        "Cut into 2 stages (load 1 is even)",
    ]
    for section in sections:
        assert section.rows
        assert {len(row) for row in section.rows} == {len(section.columns)}
    assert sections[4].rows == sections[5].rows == [("layers.*.attn", "model.py:7", "3")]


def test_what_is_not_split_or_cut_is_not_told() -> None:
    plan = tiny_file(tp=1, pp=1, splits={}, stages=tiny_plan().stages[:1])
    titles = [section.title for section in plan_sections(plan)]
    assert not any(title.startswith(("Tensors over", "Cut into")) for title in titles)


def test_the_batch_is_that_of_all_ranks() -> None:
    plan = tiny_file(dp=4, micro_batches=1)
    assert dict(plan_facts(plan))["batch"] == "64 samples: 16 on each dp rank, in 1 micro-batch"


def test_an_uneven_load_of_experts_is_told() -> None:
    plan = tiny_file(tp=1, cp=2, expert_parallel=True, expert_load=(0.5, 0.1, 0.1, 0.3))
    told = dict(plan_facts(plan))["tokens"]
    assert told == "60% to one of 2 ranks of experts, 40% to another"


def test_all_parameters_are_counted_once() -> None:
    tensors = plan_sections(tiny_file())[1]
    assert sum(int(row[-1]) for row in tensors.rows) == len(tiny_plan().parameters)


def test_a_stage_has_the_modules_of_its_runs() -> None:
    assert stage_modules(tiny_plan(), 1) == "(model)\nlayers.2.attn .. lm_head"


def test_a_plan_that_nobody_simulated_predicts_nothing() -> None:
    assert "predicted" in dict(plan_facts(tiny_file()))
    assert "predicted" not in dict(plan_facts(tiny_file(None)))
