"""What of a step a picture shows, and where."""

from __future__ import annotations

from itertools import pairwise

import pytest

from merakc.ir.program import Mesh
from merakc.report.charts.view import GAP, Axis, view
from merakc.report.packing import pack
from tests.report.made import lowered, report
from tests.report.test_packing import long_step


def test_a_whole_step_is_to_scale() -> None:
    axis = Axis(4.0)
    assert [axis.place(t) for t in (0.0, 1.0, 4.0)] == [0.0, 0.25, 1.0]


def test_a_gap_stands_for_the_middle() -> None:
    axis = Axis(100.0, (10.0, 90.0))
    half = (1.0 - GAP) / 2
    assert axis.place(10.0) == pytest.approx(half)
    assert axis.place(90.0) == pytest.approx(half + GAP)
    assert axis.place(100.0) == pytest.approx(1.0)
    places = [axis.place(float(t)) for t in range(101)]
    assert all(a < b for a, b in pairwise(places))


def test_messages_are_not_drawn() -> None:
    found = view(report(lowered(Mesh(pp=2))).timeline, 100, (0, 1))
    assert found.axis.left_out_s is None
    assert {e.kind.is_message for own in found.rows.values() for e in own} == {False}
    assert all(len(own) >= 8 for own in found.rows.values())


def test_of_a_long_step_both_ends_are_drawn() -> None:
    found = view(pack(long_step(500)), 50, (0,))
    assert found.axis.left_out_s is not None
    (events,) = found.rows.values()
    assert 45 <= len(events) <= 55
    assert (events[0].start_s, events[-1].end_s) == (0.0, pytest.approx(500.0))
