"""ZB-H1 and ZB-H2 against the figures of their paper."""

from __future__ import annotations

import pytest

from merakc.schedules.registry import make_schedule
from merakc.schedules.text import format_schedule
from tests.schedules.unit_costs import KEPT, unit_time


def test_as_text() -> None:
    assert format_schedule(make_schedule("zb-h1", 2, 3)) == (
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2\n1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"
    )


@pytest.mark.parametrize("ranks", range(1, 9))
def test_h1(ranks: int) -> None:
    """The bubble is a third of 1F1B's, 3(p - 1), and every rank holds p at most."""
    for m in range(1, 4 * ranks):
        timing = unit_time(make_schedule("zb-h1", ranks, m))
        assert max(timing.peak_bytes) == min(m, ranks) * KEPT
        if m >= ranks:
            assert timing.makespan_s == 3 * m + ranks - 1


@pytest.mark.parametrize("ranks", range(1, 9))
def test_h2(ranks: int) -> None:
    """From its first start to its last end no rank waits, with up to 2p - 1 held."""
    for m in range(1, 4 * ranks):
        timing = unit_time(make_schedule("zb-h2", ranks, m))
        assert max(timing.peak_bytes) == min(m, 2 * ranks - 1) * KEPT
        if m >= 2 * ranks - 1:
            assert timing.span_s == 3 * m
            assert timing.makespan_s == 3 * m + ranks - 1
