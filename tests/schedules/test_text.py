"""Orders as text, there and back."""

from __future__ import annotations

import pytest

from merakc.errors import ProgramError
from merakc.schedules.registry import NAMES, make_schedule
from merakc.schedules.text import format_schedule, parse_schedule


@pytest.mark.parametrize("name", NAMES)
def test_there_and_back(name: str) -> None:
    for ranks, m in ((1, 1), (3, 2), (4, 11)):
        schedule = make_schedule(name, ranks, m, recompute="full")
        text = format_schedule(schedule)
        assert parse_schedule(text, name) == schedule
        assert parse_schedule(text.replace("\n", " ; "), name) == schedule


def test_lines_semicolons_and_comments() -> None:
    text = """
    # two ranks
    0F0 0F1 0B0 0B1   # the first

    1F0 1B0 1F1 1B1;
    """
    schedule = parse_schedule(text)
    assert (schedule.name, schedule.rank_of) == ("custom", (0, 1))
    assert schedule.orders[1] == make_schedule("1f1b", 2, 2).orders[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"schedule custom is empty"),
        ("# nothing", r"schedule custom is empty"),
        ("0F0 0B0; 1F0 1X0", r"rank 1, action 1: '1X0' is no action"),
        ("0F0 0F-1", r"rank 0, action 1: '0F-1' is no action"),
        ("0F0 1F0 1B0 0B0; 1F1 1B1", r"rank 1, action 0, 1F1: stage 1 is on rank 0 already"),
        ("0F0 0B0; 2F0 2B0", r"no rank runs stage 1, but one runs stage 2"),
        ("0F0 0B0; 999999999999F0", r"no rank runs stage 1,"),
        ("0F0 0B0 0F999999999999", r"rank 0, 0F1: is missing"),
    ],
)
def test_refused(text: str, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        parse_schedule(text)
