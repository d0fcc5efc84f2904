"""Pictures in letters."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from merakc.ir.program import Mesh
from merakc.report.charts.chart import LETTERS, memory_chart, schedule_chart
from merakc.report.packing import pack
from tests.report.made import BUSY, coupled, lowered, report
from tests.report.test_packing import long_step


@pytest.mark.parametrize("width", [60, 100])
def test_each_rank_has_a_line_of_one_width(width: int) -> None:
    lines = schedule_chart(report(lowered(Mesh(pp=4)), BUSY), width)
    assert {len(line) for line in lines[:4]} == {width}
    assert max(map(len, lines)) <= width
    assert "F forward, B backward" in lines[5]
    assert all(re.match(r"rank \d \|.*\|$", line) for line in lines[:4])


def test_the_first_rank_begins_and_the_last_one_waits() -> None:
    lines = schedule_chart(report(lowered(Mesh(pp=2)), BUSY), 100)
    assert lines[0].startswith("rank 0 |F0")
    assert lines[1].startswith("rank 1 |.")
    for line in lines[:2]:
        order = re.findall(r"[FB]\d", line)
        assert sorted(order) == [f"{k}{n}" for k in "BF" for n in range(4)]


def test_what_couples_samples_stands_between_forwards_and_backwards() -> None:
    lines = schedule_chart(report(coupled(), BUSY), 100)
    assert re.search(r"F3-*\.*H-*\.*B0", lines[1])
    assert "H" not in lines[0]
    assert "H coupled loss" in " ".join(lines)


def test_what_is_left_out_is_marked() -> None:
    made = replace(report(lowered(Mesh()), BUSY), timeline=pack(long_step(1000)))
    lines = schedule_chart(made, 80)
    assert "~~" in lines[0]
    assert "the ranks go on alike" in lines[-1]
    assert len(lines[0]) == 80


def test_a_bar_has_letters_in_proportion() -> None:
    made = report(lowered(Mesh(pp=2)), BUSY)
    (memory, _) = made.memory
    full = replace(made, verdict=replace(made.verdict, memory_bytes=memory.peak_bytes))
    bar = memory_chart(full, 120)[0].split("|")[1]
    for letter, (_, size_bytes) in zip(LETTERS, memory.parts, strict=True):
        share = size_bytes / max(m.peak_bytes for m in made.memory)
        assert abs(bar.count(letter) - share * len(bar)) <= 1


def test_a_bar_ends_at_the_memory_of_a_rank_unless_little_is_used() -> None:
    made = report(lowered(Mesh(pp=2)), BUSY)
    assert "end at the highest peak" in memory_chart(made, 100)[2]
    peak = made.verdict.peak_bytes
    tight = replace(made, verdict=replace(made.verdict, memory_bytes=2 * peak))
    lines = memory_chart(tight, 100)
    assert "highest" not in lines[2]
    assert all("....." in line for line in lines[:2])
    own = tuple(replace(m, limit_bytes=n * peak) for m, n in zip(made.memory, (4, 2), strict=True))
    large, small = (line.split("|")[1] for line in memory_chart(replace(made, memory=own), 100)[:2])
    assert len(small) == len(large) == len(large.rstrip())
    assert len(small.rstrip()) == pytest.approx(len(large) / 2, abs=1)
