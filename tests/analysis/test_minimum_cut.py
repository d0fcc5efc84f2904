"""Minimum cuts."""

from __future__ import annotations

import pytest

from merakc.analysis.minimum_cut import MinimumCut


def test_the_cut_is_the_cheapest() -> None:
    cut = MinimumCut()
    cut.add("source", "a", 5.0)
    cut.add("source", "b", 1.0)
    cut.add("a", "sink", 2.0)
    cut.add("b", "sink", 3.0)
    side, saved = cut.source_side()
    assert side == {"source", "a"}
    assert saved == pytest.approx(3.0)
    cut.add("a", "b")  # a only with b
    side, saved = cut.source_side()
    assert side == {"source", "a", "b"}
    assert saved == pytest.approx(1.0)


def test_a_cut_tells_small_costs_beside_large_ones() -> None:
    cut = MinimumCut()
    for name, gain, price in (("dear", 1e14, 5.0), ("cheap", 3.0, 1.0), ("loss", 1.0, 3.0)):
        cut.add("source", name, gain)
        cut.add(name, "sink", price)
    side, saved = cut.source_side()
    assert side == {"source", "dear", "cheap"}
    assert saved == pytest.approx(1e14 - 3, rel=1e-15)
