"""What stages may keep."""

from __future__ import annotations

import pytest

from merakc.costs.work.keep import EVERYTHING, keep_bytes, with_kept
from merakc.ir.costs import StageCost
from merakc.schedules.registry import make_schedule

COST = StageCost(1.0, 2.0, recompute_s=1.0, saved_bytes=100, checkpoint_bytes=10,
                 backward_peak_bytes=20, static_bytes=1000)  # fmt: skip


@pytest.mark.parametrize(
    ("capacity", "kept"),
    [
        (1420, (EVERYTHING,) * 4),  # four in flight on the first stage, one on the last
        (1419, (74, EVERYTHING, EVERYTHING, EVERYTHING)),
        (1220, (25, 33, EVERYTHING, EVERYTHING)),
        (1000, (0, 0, 0, 0)),
    ],
)
def test_later_stages_keep_more(capacity: int, kept: tuple[int, ...]) -> None:
    schedule = make_schedule("1f1b", 4, 8)
    assert keep_bytes(schedule, [COST] * 4, [capacity] * 4) == kept


def test_stages_of_one_rank_share_its_memory() -> None:
    schedule = make_schedule("zb-v", 2, 4)
    found = keep_bytes(schedule, [COST] * 4, [2300, 10_000])
    assert found[1:3] == (EVERYTHING, EVERYTHING)
    assert 0 < found[0] == found[3] < 100


def test_what_is_kept_is_not_computed_again() -> None:
    assert with_kept(COST, EVERYTHING) is COST
    assert with_kept(COST, 25).recompute_s == 0.75
    assert with_kept(COST, 25).checkpoint_bytes == 25
    assert with_kept(COST, 5).checkpoint_bytes == 10
    assert with_kept(COST, 200).recompute_s == 0.0
