"""METIS's proposals: valid orders that follow branches, and silence."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from merakc.passes.stages.interval import SPEED_UNIT, Value, WeightedDag
from merakc.passes.stages.metis import _partition, _ranked, proposals


def towers(layers: int) -> WeightedDag:
    """Two chains recorded layer by layer in turn; nodes 0, 2, ... are the first."""
    count = 2 * layers
    values = tuple(Value(i, (i + 2,), 100) for i in range(count - 2))
    return WeightedDag((1000,) * count, values)


def scattered(count: int, seed: int) -> WeightedDag:
    """Every node reads up to three earlier ones."""
    draw = random.Random(seed)
    readers: list[set[int]] = [set() for _ in range(count)]
    for node in range(1, count):
        for _ in range(draw.randint(0, 3)):
            readers[draw.randrange(node)].add(node)
    values = (
        Value(i, tuple(sorted(r)), draw.choice([0, 1, 1 << 35])) for i, r in enumerate(readers)
    )
    weights = tuple(draw.choice([0, 1, 1 << 40]) for _ in range(count))
    return WeightedDag((1,) * 8 + weights[8:], tuple(v for v in values if v.readers))


def test_interleaved_towers_are_followed_one_after_the_other() -> None:
    first, second = tuple(range(0, 24, 2)), tuple(range(1, 24, 2))
    orders = [proposal.order for proposal in proposals(towers(12), 2, seed=0)]
    assert first + second in orders or second + first in orders


@pytest.mark.parametrize("seed", range(12))
def test_orders_are_topological_and_each_is_proposed_once(seed: int) -> None:
    dag = scattered(60, seed)
    found = proposals(dag, 4, seed=seed)
    assert found
    assert len({proposal.order for proposal in found}) == len(found)
    for proposal in found:
        assert sorted(proposal.order) == list(range(60))
        dag.reordered(proposal.order)  # refuses an order that is not topological
        assert len(proposal.parts) == 60


@pytest.mark.parametrize("stages", [2, 3, 4, 5, 6])
def test_parts_lie_one_after_the_other_where_the_edges_allow_it(stages: int) -> None:
    for seed in range(3):
        for proposal in proposals(towers(40), stages, seed=seed):
            along = [proposal.parts[node] for node in proposal.order]
            assert along == sorted(along)


def test_parts_are_ranked_branch_by_branch() -> None:
    # By mean place alone the towers' halves would alternate: 0, 2, 1, 3.
    parts = [2, 0, 2, 0, 3, 1, 3, 1]
    assert _ranked(towers(4), parts) == [0, 2, 0, 2, 1, 3, 1, 3]


def test_nothing_is_proposed_for_one_stage_or_a_tiny_graph() -> None:
    assert proposals(towers(12), 1, seed=0) == []
    assert proposals(towers(3), 4, seed=0) == []


def test_parts_have_the_shares_asked_for() -> None:
    chain = WeightedDag((1000,) * 80, tuple(Value(i, (i + 1,), 100) for i in range(79)))
    for shares, expected in ((None, [40, 40]), ([0.25, 0.75], [20, 60])):
        parts = _partition(chain, 2, 0, 30, shares, in_order=True)
        assert sorted(Counter(parts).values()) == pytest.approx(expected, abs=3)


@pytest.mark.parametrize("speeds", [False, True])
@pytest.mark.parametrize("stages", [4, 16, 32])
@pytest.mark.parametrize("heavy", [0, 1, 3])
def test_metis_prints_nothing_whatever_the_weights(
    stages: int, heavy: int, speeds: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    count = 6 * stages
    chain = tuple(Value(i, (i + 1,), 100) for i in range(count - 1))
    dag = WeightedDag((1,) * (count - heavy) + (100_000,) * heavy, chain)
    rates = [(1 + 9 * (k % 2)) * SPEED_UNIT for k in range(stages)] if speeds else None
    assert proposals(dag, stages, 0, rates)
    assert capfd.readouterr() == ("", "")
