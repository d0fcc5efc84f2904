"""Texts of what blocks keep, and of budgets."""

from __future__ import annotations

import pytest

from merakc.ir.recompute import (
    Budget,
    Keep,
    Run,
    again_name,
    format_runs,
    parse_budget,
    parse_runs,
    run_of,
)


def test_runs_are_read_as_they_are_written() -> None:
    text = "3 kept, 2 x 2 again, 1 products"
    runs = (
        Run(Keep.KEPT, 3), Run(Keep.AGAIN, 2), Run(Keep.AGAIN, 2), Run(Keep.PRODUCTS, 1),
    )  # fmt: skip
    assert parse_runs(text) == runs
    assert format_runs(runs) == text


@pytest.mark.parametrize("text", ["", "again", "0 again", "2 x again", "1 lost", "1 kept,1 again"])
def test_what_is_no_run_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not written like"):
        parse_runs(text)


@pytest.mark.parametrize(
    "text", ["9999999999 x 1 again", "30000 x 1 again, 30000 x 1 kept", "1" * 5000 + " kept"]
)
def test_a_text_makes_no_more_runs_than_a_plan_can_have(text: str) -> None:
    with pytest.raises(ValueError, match="more than 50,000 runs"):
        parse_runs(text)


def test_names_tell_the_run() -> None:
    assert run_of(again_name(12, "j:mm")) == 12
    assert run_of("j:mm") is None


def test_budgets() -> None:
    assert parse_budget("40 GiB") == Budget(40 * 2**30)
    assert parse_budget("1.5mb") == Budget(1_500_000)
    assert parse_budget("0.25") == Budget(share=0.25)
    assert [parse_budget(t) for t in ("full", "1.5", "-1", "0 GiB", "40", "nan")] == [None] * 6
