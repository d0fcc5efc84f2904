"""The arenas of a plan's ranks in its report."""

from __future__ import annotations

from dataclasses import replace

import pytest

from merakc.ir.program import Mesh
from merakc.report import arenas
from merakc.report.arenas import with_arenas
from merakc.report.findings import report_sections
from tests.report.made import lowered, report


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_every_rank_has_an_arena_little_above_its_bound(schedule: str) -> None:
    made = lowered(Mesh(pp=2), schedule)
    for own in with_arenas(report(made).memory, made):
        assert own.bound_bytes <= own.arena_bytes <= 1.03 * own.bound_bytes
        moving = own.activations_bytes + own.transient_bytes + own.messages_bytes
        # The simulator's costs are rougher than the graphs that the arena is for.
        assert own.bound_bytes == pytest.approx(moving, rel=0.1)


def test_long_steps_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    made = lowered(Mesh(pp=2))
    monkeypatch.setattr(arenas, "MOST_CALLS", 4 * len(made.stages.local[0].nodes))
    assert [bool(own.arena_bytes) for own in with_arenas(report(made).memory, made)] == [
        4 * len(graph.nodes) <= arenas.MOST_CALLS for graph in made.stages.local
    ]
    monkeypatch.setattr(arenas, "MOST_CALLS", 10)
    assert tuple(with_arenas(report(made).memory, made)) == report(made).memory


def test_arenas_are_shown_where_there_are_any() -> None:
    made = report(lowered(Mesh(pp=2)))
    assert "arena" not in report_sections(made)["memory"].columns
    first, second = made.memory
    first = replace(first, arena_bytes=first.peak_bytes, bound_bytes=first.peak_bytes // 2)
    section = report_sections(replace(made, memory=(first, second)))["memory"]
    assert [*section.columns][-2:] == ["arena", "over bound"]
    assert section.rows[0][-1] == "x 2.000"
    assert section.rows[1][-2:] == ("-", "-")
