"""A report as one line, and as tables."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from merakc.ir.program import Mesh
from merakc.report.findings import report_sections, throughput, utilization, verdict
from tests.ir.test_report import OTHERS, STEP
from tests.report.made import BUSY, lowered, report


def test_the_verdict_is_one_line() -> None:
    found = replace(STEP, memory_bytes=200, tokens=8000)
    assert verdict(found) == (
        "2.00 s a step, MFU 25.0%, bubble 25.0%, peak 100 B of 200 B on rank 1, "
        "1.00 k tokens/s/device"
    )
    assert "DOES NOT FIT" in verdict(replace(found, memory_bytes=50))
    assert "± 6% a step" in verdict(replace(found, step_error=0.06))


def test_samples_count_where_there_are_no_tokens() -> None:
    assert throughput(STEP) == "1.00 samples/s/device"


def test_utilization_says_what_it_is_of() -> None:
    assert utilization(STEP) == (
        "MFU: 6.00 TFLOP of the model's forward and backward, over the step at 12.0 TFLOP/s, "
        "4 x a test."
    )


def test_rows_have_a_cell_for_each_column() -> None:
    made = replace(report(cluster=BUSY), alternatives=OTHERS)
    sections = report_sections(made)
    assert [*sections][:2] == ["runners-up", "refusals"]
    assert {"stages", "ranks", "memory", "traffic", "nodes", "file 0", "origins"} <= {*sections}
    for section in sections.values():
        assert section.rows
        assert {len(row) for row in section.rows} == {len(section.columns)}


def test_devices_are_told_where_they_differ() -> None:
    made = report(lowered(Mesh(pp=2)))
    assert "device" not in report_sections(made)["stages"].columns
    assert "has" not in report_sections(made)["memory"].columns
    stages = tuple(replace(s, device=f"kind {s.rank}") for s in made.stages)
    memory = tuple(replace(m, limit_bytes=10**9 * (m.rank + 1)) for m in made.memory)
    sections = report_sections(replace(made, stages=stages, memory=memory))
    assert [row[-1] for row in sections["stages"].rows] == ["kind 0", "kind 1"]
    first, second = (float(row[-1]) for row in sections["memory"].rows)
    assert second == pytest.approx(2 * first)
    assert not sections["memory"].note.startswith("A rank has")


def test_what_is_reserved_is_told() -> None:
    made = report(lowered(Mesh(pp=2)))
    assert "reserved" not in report_sections(made)["memory"].note
    less = replace(
        made, verdict=replace(made.verdict, memory_bytes=1 << 30, reserved_bytes=1 << 20)
    )
    told = "A rank has 1.00 GiB for tensors, beside 1.00 MiB reserved. "
    assert report_sections(less)["memory"].note.startswith(told)


def test_what_was_not_searched_for_is_not_told() -> None:
    sections = report_sections(report(lowered(Mesh())))
    assert not {"runners-up", "refusals", "traffic"} & {*sections}


def test_runners_up_say_by_how_much_they_lose() -> None:
    made = replace(report(), alternatives=OTHERS, verdict=replace(STEP, step_s=0.2))
    (row,) = report_sections(made)["runners-up"].rows
    assert row[0] == "8 x 1 x 1, 4 micro-batches, shards 1, 1, 8"
    assert "+25.0%" in row
    assert row[-1] == "waits for dp"
    (refused,) = report_sections(made)["refusals"].rows
    assert refused[-1] == "use tp 4 or 12"


def test_runners_up_are_compared_with_what_the_chosen_plan_takes_by_the_same_costs() -> None:
    (first,) = OTHERS.runners_up
    strategy = replace(
        first.strategy, pp=2, schedule="interleaved-1f1b", chunks=2, sequence_parallel=True,
        micro_batches=1, recompute="full", state_shards=(),
    )  # fmt: skip
    wide = replace(first, strategy=strategy)
    others = replace(OTHERS, runners_up=(first, wide), chosen_s=0.125)
    made = replace(report(), alternatives=others, verdict=replace(STEP, step_s=0.2))
    section = report_sections(made)["runners-up"]
    assert section.rows[0][2] == "+100.0%"
    assert section.rows[1][0] == (
        "8 x 1 x 2, 1 micro-batch, interleaved-1f1b with 2 stages a rank, sequence parallel, "
        "recompute full"
    )
    assert "takes 125.00 ms; it was then planned in full, and takes 200.00 ms" in section.note
    same = replace(made, alternatives=replace(others, chosen_s=0.2))
    assert report_sections(same)["runners-up"].note == ""


def test_the_action_at_the_peak_is_said_in_words() -> None:
    made = report()
    memory = replace(made.memory[0], action="3W12")
    note = report_sections(replace(made, memory=(memory,)))["memory"].note
    assert "While 3W12: stage 3, gradients of weights, micro-batch 12." in note


def test_shares_of_a_rank_are_its_seconds() -> None:
    made = report()
    for row in report_sections(made)["ranks"].rows:
        assert sum(float(cell.rstrip("%")) for cell in row[1:]) == pytest.approx(100, abs=0.5)


def test_what_is_not_listed_is_counted() -> None:
    made = report()
    note = report_sections(made)["nodes"].note
    (more,) = re.findall(r"(\d+) other kinds", note)
    assert int(more) == made.node_count - len(made.nodes)


def test_source_is_told_by_function() -> None:
    file = report_sections(report(cluster=BUSY))["file 0"]
    assert any(row[2].startswith("in ") and not row[0] for row in file.rows)
