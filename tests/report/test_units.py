"""Quantities and names as people read them."""

from __future__ import annotations

import pytest

from merakc.report.units import (
    bytes_unit,
    format_bytes,
    format_count,
    format_seconds,
    name_pattern,
)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0.00"), (9.994, "9.99"), (12.34, "12.3"), (999.4, "999"), (1234, "1.23 k"),
     (56_700_000, "56.7 M"), (8.03e9, "8.03 G"), (4.9e14, "490 T"), (3e15, "3.00 P")],
)  # fmt: skip
def test_counts_have_three_digits(number: float, text: str) -> None:
    assert format_count(number) == text


@pytest.mark.parametrize(
    ("time_s", "text"),
    [(599.994, "599.99 s"), (600.4, "10 min 0 s"), (45_240, "12 h 34 min"), (1e6, "11 d 14 h"),
     (float("inf"), "inf s")],
)  # fmt: skip
def test_long_times_are_told_in_two_units(time_s: float, text: str) -> None:
    assert format_seconds(time_s) == text


def test_bytes_and_seconds() -> None:
    assert (format_bytes(1536), format_seconds(0.0015)) == ("1.50 KiB", "1.50 ms")
    assert bytes_unit(1536) == ("KiB", 1 / 1024)
    assert (bytes_unit(1 << 40)[0], bytes_unit(0)) == ("GiB", ("B", 1.0))


def test_indices_of_layers_become_stars() -> None:
    assert name_pattern("h.3.mlp.0") == "h.*.mlp.*"
    assert name_pattern("conv2d.fc1") == "conv2d.fc1"
