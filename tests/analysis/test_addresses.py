"""Packings of lives against the best there is, and that none lie on each other."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ortools.sat.python import cp_model

from merakc.analysis.addresses import Arena, place
from merakc.analysis.lives import Life, most_alive


@st.composite
def lives(draw: st.DrawFn, most: int, largest: int) -> list[Life]:
    found = []
    for k in range(draw(st.integers(0, most))):
        start = draw(st.integers(0, 20))
        size, length = draw(st.integers(1, largest)), draw(st.integers(0, 10))
        found.append(Life(f"v{k}", size, start, start + length))
    return found


def check(found: Arena, of: list[Life], alignment_bytes: int = 1) -> None:
    """That lives which meet are apart, aligned, and inside the arena."""
    ends = [begin + own.size_bytes for begin, own in zip(found.offsets, of, strict=True)]
    assert all(begin % alignment_bytes == 0 for begin in found.offsets)
    assert max(ends, default=0) <= found.size_bytes
    for a, b in combinations(range(len(of)), 2):
        if of[a].start <= of[b].stop and of[b].start <= of[a].stop:
            assert ends[a] <= found.offsets[b] or ends[b] <= found.offsets[a]


def least_bytes(of: list[Life]) -> int:
    """The smallest arena, by CP-SAT."""
    model: Any = cp_model.CpModel()
    most = sum(own.size_bytes for own in of)
    top, times, places = model.new_int_var(0, most, "top"), [], []
    for own in of:
        begin = model.new_int_var(0, most, "")
        model.add(top >= begin + own.size_bytes)
        places.append(model.new_fixed_size_interval_var(begin, own.size_bytes, ""))
        times.append(model.new_fixed_size_interval_var(own.start, 1 + own.stop - own.start, ""))
    model.add_no_overlap_2d(times, places)
    model.minimize(top)
    solver: Any = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    assert solver.solve(model) == cp_model.OPTIMAL
    return round(solver.objective_value)


@given(lives(40, 300), st.sampled_from([1, 64]))
def test_what_lives_at_once_lies_apart(of: list[Life], alignment_bytes: int) -> None:
    found = place(of, alignment_bytes)
    check(found, of, alignment_bytes)
    assert found.size_bytes >= found.bound_bytes >= most_alive(of)


@given(lives(7, 9))
def test_few_lives_take_what_is_best_or_little_more(of: list[Life]) -> None:
    found, least = place(of, 1), least_bytes(of)
    assert found.bound_bytes <= least <= found.size_bytes
    assert found.size_bytes <= least * 1.2


def test_most_alive_counts_both_ends() -> None:
    of = [Life("a", 3, 0, 1), Life("b", 5, 1, 2), Life("c", 4, 2, 2), Life("d", 9, 3, 3)]
    assert [most_alive(of[:k]) for k in range(5)] == [0, 3, 8, 9, 9]


def test_what_sticks_out_is_placed_earlier() -> None:
    """Also where the largest first is not best."""
    of = [
        Life("a", 3, 0, 2), Life("b", 3, 4, 6), Life("c", 2, 2, 4), Life("d", 2, 0, 0),
        Life("e", 2, 6, 6), Life("f", 5, 8, 8),
    ]  # fmt: skip
    assert place(of, 1).size_bytes == least_bytes(of)


@pytest.mark.parametrize("count", [2, 5])
def test_one_after_the_other_lie_in_one_place(count: int) -> None:
    of = [Life(f"v{k}", 100, 2 * k, 2 * k + 1) for k in range(count)]
    assert place(of).size_bytes == 128
    assert place(of).share == 1.0
