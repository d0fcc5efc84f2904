"""The kinds of rows: all of them are in use, and compare by what they say."""

from __future__ import annotations

from merakc.passes.sharding import rows
from merakc.passes.sharding.rules import ROWS


def test_every_kind_is_in_the_table() -> None:
    kinds = {rows.Along, rows.Last, rows.Reduce, rows.Loss, rows.Shape, rows.Whole, str}
    assert {type(row) for row in ROWS.values()} == kinds


def test_rows_that_say_the_same_are_equal() -> None:
    assert rows.Along() == rows.Along("dim")
    assert rows.Reduce("sum") != rows.Reduce("mean")
    assert len({rows.Last(2), rows.Last(2), rows.Last(3)}) == 2
