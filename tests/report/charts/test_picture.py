"""The schedule and the memory, drawn."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from merakc.ir.program import Mesh
from merakc.report.charts.picture import LABEL_WIDTH, WIDTH, memory_picture, schedule_picture
from merakc.report.packing import pack
from tests.report.made import BUSY, lowered, report
from tests.report.test_packing import long_step

RECT = re.compile(r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="18" class="k(\w)">')


def test_every_compute_is_a_box_in_its_rank_s_row() -> None:
    made = report(lowered(Mesh(pp=2)), BUSY)
    boxes = RECT.findall(schedule_picture(made))
    for row in (0, 1):
        own = [(float(x), float(w), kind) for x, y, w, kind in boxes if float(y) == 22 * row]
        assert [kind for *_, kind in own if kind in "fb"].count("f") == 4
        assert [kind for *_, kind in own].count("b") == 4
        ends = [x + w for x, w, _ in own]
        assert all(x >= end - 1e-2 for (x, _, _), end in zip(own[1:], ends, strict=False))


def test_boxes_are_to_scale() -> None:
    made = report(lowered(Mesh(pp=2)), BUSY)
    widths = {kind: float(w) for _, _, w, kind in RECT.findall(schedule_picture(made))}
    cost = made.stages[1]
    shown = widths["b"] / (WIDTH - LABEL_WIDTH) * made.verdict.step_s
    assert shown == pytest.approx(cost.backward_s, rel=1e-3)


def test_numbers_of_micro_batches_stand_in_boxes() -> None:
    picture = schedule_picture(report(lowered(Mesh(pp=2)), BUSY))
    assert {*re.findall(r'class="nf">(\d)<', picture)} == {"0", "1", "2", "3"}


def test_what_is_left_out_is_a_gap() -> None:
    made = replace(report(lowered(Mesh()), BUSY), timeline=pack(long_step(1000)))
    picture = schedule_picture(made)
    assert "the ranks go on alike" in picture
    assert len(RECT.findall(picture)) < 130
    times = re.findall(r'class="label (?:start|end)">([^<]+)', picture)
    assert times == ["0", "55.00 s", "15 min 45 s", "16 min 40 s"]


def test_collectives_run_along_the_edge() -> None:
    made = report(lowered(Mesh(2, 1, 2), shards=(2, 2, 2)), BUSY)
    picture = schedule_picture(made)
    assert re.search(r'height="4" class="k[gd] lane"', picture)
    assert "gather over dp" in picture
    assert re.search(r'class="idle"><title>waits for gather ', picture)


def test_bars_have_parts_that_fill_them() -> None:
    made = report(lowered(Mesh(pp=2)), BUSY)
    bars = memory_picture(made).split('class="bar"')[1:]
    widths = [sum(map(float, re.findall(r"width:([\d.]+)%", bar))) for bar in bars]
    peaks = [m.peak_bytes for m in made.memory]
    assert widths == pytest.approx([100 * p / max(peaks) for p in peaks], abs=0.01)


def test_too_much_is_marked() -> None:
    made = report(lowered(Mesh(pp=2)), BUSY)
    tight = replace(made, verdict=replace(made.verdict, memory_bytes=1))
    assert memory_picture(tight).count('class="bar over"') == 2
    first, second = tight.memory
    enough = replace(tight, memory=(replace(first, limit_bytes=first.peak_bytes), second))
    assert memory_picture(enough).count('class="bar over"') == 1
    assert "bar over" not in memory_picture(made)
