"""The dynamic programs against brute force over every set of intervals."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from merakc.passes.stages.interval import (
    SPEED_UNIT,
    Value,
    WeightedDag,
    cut_bytes,
    largest_load,
    least_bytes,
    least_largest_load,
)


@st.composite
def dags(draw: st.DrawFn) -> WeightedDag:
    """Up to nine nodes, some without weight, and values read by up to four."""
    count = draw(st.integers(3, 9))
    weights = draw(st.lists(st.sampled_from([0, 1, 2, 3, 50]), min_size=count, max_size=count))
    weights[draw(st.integers(0, count - 1))] = 1
    values = []
    for producer in range(count - 1):
        readers = draw(st.sets(st.integers(producer + 1, count - 1), max_size=4))
        if readers:
            size_bytes = draw(st.integers(0, 5))
            values.append(Value(producer, tuple(sorted(readers)), size_bytes))
    return WeightedDag(tuple(weights), tuple(values))


def every_cut(dag: WeightedDag, stages: int) -> list[list[int]]:
    """All intervals of which each has work to do."""
    count, cuts = len(dag.weights), []
    for inner in combinations(range(1, count), stages - 1):
        ends = (0, *inner, count)
        if all(sum(dag.weights[a:b]) for a, b in pairwise(ends)):
            cuts.append([k for k, (a, b) in enumerate(pairwise(ends)) for _ in range(a, b)])
    return cuts


SPEEDS = st.sampled_from([SPEED_UNIT, SPEED_UNIT * 4 // 3, 2 * SPEED_UNIT, 100 * SPEED_UNIT])
PER_STAGE = st.none() | st.lists(SPEEDS, min_size=4, max_size=4)


@settings(max_examples=250, deadline=None)
@given(dags(), st.integers(1, 4), st.sampled_from([1.0, 1.03, 1.5]), PER_STAGE)
def test_load_and_bytes_equal_brute_force(
    dag: WeightedDag, stages: int, slack: float, speeds: list[int] | None
) -> None:
    stages = min(stages, sum(weight > 0 for weight in dag.weights))
    speeds = speeds and speeds[:stages]
    cuts = every_cut(dag, stages)
    loads = [largest_load(dag, cut, stages, speeds) for cut in cuts]
    load = least_largest_load(dag.weights, stages, speeds)
    assert load == min(loads)

    allowed = int(load * slack)
    found = least_bytes(dag, stages, allowed, speeds)

    assert found in cuts
    assert largest_load(dag, found, stages, speeds) <= allowed
    assert cut_bytes(dag, found) == min(
        cut_bytes(dag, cut) for cut, own in zip(cuts, loads, strict=True) if own <= allowed
    )


def test_a_load_is_the_weight_over_the_speed() -> None:
    dag = WeightedDag((6, 3, 9), ())
    assert largest_load(dag, [0, 0, 1], 2) == 9
    assert largest_load(dag, [0, 0, 1], 2, [SPEED_UNIT, 3 * SPEED_UNIT]) == 9
    assert largest_load(dag, [0, 0, 1], 2, [3 * SPEED_UNIT, SPEED_UNIT * 3 // 2]) == 6


def test_a_node_too_heavy_for_a_slow_stage_goes_to_a_fast_one() -> None:
    # The slow stages take a light node each; either end alone would keep a slow one for longer.
    weights, speeds = (1, 10, 10, 1), [SPEED_UNIT, 20 * SPEED_UNIT, SPEED_UNIT]
    assert least_largest_load(weights, 3, speeds) == 1
    assert least_bytes(WeightedDag(weights, ()), 3, 1, speeds) == [0, 1, 1, 2]
    assert least_largest_load((10, 10, 10), 3, speeds) == 10


def test_a_value_is_counted_once_per_reading_stage() -> None:
    dag = WeightedDag((1, 1, 1, 1), (Value(0, (1, 2, 3), 10), Value(1, (3,), 7)))
    assert cut_bytes(dag, [0, 0, 1, 1]) == 10 + 7
    assert cut_bytes(dag, [0, 1, 2, 3]) == 3 * 10 + 7
    assert cut_bytes(dag, [0, 0, 0, 0]) == 0


def test_crossing_bytes_at_every_boundary() -> None:
    dag = WeightedDag((1, 1, 1, 1), (Value(0, (1, 3), 10), Value(1, (2,), 7)))
    assert dag.crossing_bytes().tolist() == [0, 10, 17, 10, 0]


def test_equal_bytes_are_settled_by_even_loads() -> None:
    # The heavy end allows any load up to 100 before it; only the squares ask for 3, 3, 3.
    dag = WeightedDag((1,) * 9 + (100,), tuple(Value(i, (i + 1,), 5) for i in range(9)))
    assert least_bytes(dag, 4, 100) == [0] * 3 + [1] * 3 + [2] * 3 + [3]
    speeds = [SPEED_UNIT * 2, SPEED_UNIT * 2, SPEED_UNIT, SPEED_UNIT]
    assert least_bytes(dag, 4, 100, speeds) == [0] * 4 + [1] * 4 + [2] + [3]


def test_reordering_renumbers_values_and_refuses_what_is_not_topological() -> None:
    dag = WeightedDag((1, 2, 3), (Value(0, (2,), 4),))
    assert dag.reordered((1, 0, 2)) == WeightedDag((2, 1, 3), (Value(1, (2,), 4),))
    with pytest.raises(AssertionError, match="topological"):
        dag.reordered((2, 1, 0))
