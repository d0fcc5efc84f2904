"""The lattice of state sharding."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from merakc.errors import ConfigError
from merakc.ir.state import StateShards, check_shards, lattice


def test_the_named_points_are_in_the_lattice() -> None:
    found = list(lattice(8))
    ddp, zero1, zero2, zero3 = (1, 1, 1), (1, 1, 8), (1, 8, 8), (8, 8, 8)
    for counts in (ddp, zero1, zero2, zero3, (4, 4, 4), (2, 2, 8), (2, 8, 8)):
        assert StateShards(*counts) in found
    assert found[0] == StateShards()


@given(st.integers(1, 96))
def test_the_lattice_is_all_that_is_allowed(dp: int) -> None:
    found = set(lattice(dp))
    for shards in found:
        shards.check(dp)
    divisors = [d for d in range(1, dp + 1) if dp % d == 0]
    allowed = {
        (p, g, o)
        for p in divisors
        for g in divisors
        for o in divisors
        if g in (p, o) and g % p == 0 and o % g == 0
    }
    assert {(s.parameters, s.gradients, s.optimizer) for s in found} == allowed


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ((0, 1, 1), "must be 1 or more"),
        ((1, 2, 4), r"gradients must be sharded like parameters \(1\) or optimizer state \(4\)"),
        ((4, 4, 2), "must divide the next"),
        ((2, 3, 3), "must divide the next"),
    ],
)
def test_what_is_not_allowed_is_refused(counts: tuple[int, int, int], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        StateShards(*counts)


def test_shards_divide_over_the_ranks() -> None:
    with pytest.raises(ConfigError, match="4 must divide the 6 ranks"):
        StateShards(2, 2, 4).check(6)


@given(st.integers(1, 24), st.integers(1, 24))
def test_fewer_ranks_share_in_as_many_shards_as_they_can(dp: int, ep: int) -> None:
    for shards in lattice(dp * ep):
        own = shards.within(dp)
        own.check(dp)
        assert all(a % b == 0 for a, b in zip(shards.counts, own.counts, strict=True))
    assert StateShards(1, dp * ep, dp * ep, 4).within(dp) == StateShards(1, dp, dp, 4)
    assert StateShards(dp, dp, dp).within(dp) == StateShards(dp, dp, dp)


def test_what_names_no_shards_is_refused_whatever_the_ranks() -> None:
    for right in (None, "auto", "zero-3", (1, 1, 8), ["zero-0", (1, 4, 4)]):
        check_shards(right)
    for wrong, text in (
        ("zero-4", "'zero-4' is not known"), ((1, 2), "must be three numbers"),
        (["zero-1", "zero"], "'zero' is not known"), ((1, 1, "zero-1"), "1 must be three numbers"),
        ((1, 3, 8), "must"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=text):
            check_shards(wrong)  # type: ignore[arg-type]
