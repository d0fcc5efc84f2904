"""The V schedules against the figures of their paper."""

from __future__ import annotations

import pytest

from merakc.schedules.registry import make_schedule
from merakc.schedules.text import format_schedule
from tests.schedules.unit_costs import peak, unit_time


def test_v_min_as_text() -> None:
    assert format_schedule(make_schedule("v-min", 2, 2)) == (
        "0F0 3F0 3I0 3W0 0F1 0I0 0W0 3F1 3I1 3W1 0I1 0W1\n"
        "1F0 2F0 2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 2W1 1W1"
    )


@pytest.mark.parametrize("ranks", range(1, 12))
def test_zb_v_waits_only_at_the_start(ranks: int) -> None:
    for m in range(1, 4 * ranks):
        timing = unit_time(make_schedule("zb-v", ranks, m))
        assert peak(timing) == min(m, ranks)
        least_s = 3 * m + (ranks - 1) / 2
        if m % ranks == 0:
            assert timing.makespan_s == least_s
        elif m > 3 * ranks:
            assert least_s <= timing.makespan_s <= least_s + 1


@pytest.mark.parametrize("ranks", range(1, 12))
def test_memory_is_a_half_or_a_third(ranks: int) -> None:
    for m in range(1, 5 * ranks):
        assert peak(unit_time(make_schedule("v-half", ranks, m))) <= ranks / 2 + 1
        assert peak(unit_time(make_schedule("v-min", ranks, m))) <= ranks / 3 + 4 / 3


@pytest.mark.parametrize("name", ["v-half", "v-min"])
def test_every_further_micro_batch_takes_its_work_alone(name: str) -> None:
    for ranks in range(1, 12):
        few = unit_time(make_schedule(name, ranks, 4 * ranks)).makespan_s
        more = unit_time(make_schedule(name, ranks, 5 * ranks)).makespan_s
        assert more - few == 3 * ranks
