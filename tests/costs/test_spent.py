"""Sums of events, on two ranks whose times are known."""

from __future__ import annotations

import pytest

from merakc.costs.spent import Total, by_rank, merged, rank_totals
from merakc.ir.ledger import Spent
from merakc.ir.program import ActionKind, CollectiveEvent, Event

EVENTS = (
    Event(0, "recv 0F0 h <- 1", ActionKind.RECV, 0.0, 1.0),
    Event(0, "1F0", ActionKind.FORWARD, 1.0, 3.0),
    Event(0, "send 1F0 h -> 1", ActionKind.SEND, 3.0, 3.0),
    Event(0, "1F1", ActionKind.FORWARD, 3.0, 4.0),
    Event(0, "1B0", ActionKind.BACKWARD, 4.0, 8.0),
    Event(0, "reduce 1", ActionKind.REDUCE, 8.0, 8.5),
)


def inside(wait_start_s: float, wait_end_s: float, rank: int = 0) -> CollectiveEvent:
    return CollectiveEvent(
        rank,
        "all_reduce",
        "tp",
        8,
        wait_start_s,
        wait_start_s,
        wait_end_s,
        wait_start_s,
        wait_end_s,
    )


def test_the_totals_of_a_rank() -> None:
    found = rank_totals(EVENTS, [inside(1.5, 2.0), inside(3.25, 3.5), inside(7.0, 8.0)])
    assert found == {
        (0, "recv"): Total(1, 1.0, 1.0),
        (1, "F"): Total(2, 3.0, 0.75),
        (1, "B"): Total(1, 4.0, 1.0),
        (1, "reduce"): Total(1, 0.5, 0.0),
    }


def test_what_waits_outside_of_computes_is_none_of_theirs() -> None:
    assert rank_totals(EVENTS, [inside(0.2, 0.5), inside(8.1, 8.4)]) == rank_totals(EVENTS)


def test_ranks_are_averaged_and_the_slowest_is_kept() -> None:
    other = Event(1, "1F0", ActionKind.FORWARD, 0.0, 5.0)
    each = by_rank([*EVENTS, other], [inside(1.5, 2.0), inside(0.0, 1.0, rank=1)])
    assert [own[1, "F"] for own in each] == [Total(2, 3.0, 0.5), Total(1, 5.0, 1.0)]
    found = {(own.stage, own.kind): own for own in merged([*each, {(1, "F"): Total()}])}
    assert found[1, "F"] == Spent(1, "F", 2, 4.0, 5.0, pytest.approx(0.75))
    assert found[1, "F"].computed_s == pytest.approx(3.25)
    assert [own.kind for own in merged(each)] == ["recv", "B", "F", "reduce"]
