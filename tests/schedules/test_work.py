"""Actions as pairs of integers."""

from __future__ import annotations

import pytest

from merakc.schedules.registry import NAMES, make_schedule
from merakc.schedules.work import (
    INPUT_GRAD,
    count_micro_batches,
    decode,
    encode,
    to_action,
)


@pytest.mark.parametrize("name", NAMES)
def test_encoding_loses_nothing(name: str) -> None:
    schedule = make_schedule(name, 3, 5, recompute="full")
    assert count_micro_batches(schedule) == 5
    assert decode(name, schedule.rank_of, encode(schedule), 5) == schedule


def test_a_unit_is_a_micro_batch_of_a_stage() -> None:
    assert str(to_action((INPUT_GRAD, 2 * 5 + 3), 5)) == "2I3"
