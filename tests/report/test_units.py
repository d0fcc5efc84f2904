"""Quantities and names as people read them."""

from __future__ import annotations

import pytest

from merakc.report.units import (
    bytes_unit,
    count_of,
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


def test_names_of_many_and_of_one() -> None:
    assert count_of(1, "micro-batch") == "1 micro-batch"
    assert (count_of(2, "batch"), count_of(2048, "rank")) == ("2 batches", "2,048 ranks")


def test_bytes_and_seconds() -> None:
    assert (format_bytes(1536), format_seconds(0.0015)) == ("1.50 KiB", "1.50 ms")
    assert bytes_unit(1536) == ("KiB", 1 / 1024)
    assert (bytes_unit(1 << 40)[0], bytes_unit(0)) == ("GiB", ("B", 1.0))


def test_indices_of_layers_become_stars() -> None:
    assert name_pattern("h.3.mlp.0") == "h.*.mlp.*"
    assert name_pattern("conv2d.fc1") == "conv2d.fc1"
