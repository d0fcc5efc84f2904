"""The search over the lattice."""

from __future__ import annotations

import pytest

from merakc.costs.fabric import Fabric
from merakc.costs.state import DpGroup, Layer, state_cost
from merakc.errors import PlanError
from merakc.ir.state import StateShards, lattice
from merakc.passes.programs.state import choose_state

LAYERS = [Layer(10**9, 0.1, 0.2)] * 4
FAST = DpGroup(64, Fabric(8, 100e9, 40e9, 1e-6, 1e-5))


def test_with_room_the_least_is_communicated() -> None:
    shards, cost = choose_state(LAYERS, 4, FAST, budget_bytes=10**12)
    for other in lattice(64):
        assert state_cost(LAYERS, 4, other, FAST).step_s >= cost.step_s - 1e-9
    assert shards.parameters == 1


def test_without_room_the_parameters_are_sharded() -> None:
    least = state_cost(LAYERS, 4, StateShards(64, 64, 64), FAST).state_bytes
    assert choose_state(LAYERS, 4, FAST, least)[0] == StateShards(64, 64, 64)
    with pytest.raises(PlanError, match=f"take {least} bytes of each rank.*and {least - 1} are"):
        choose_state(LAYERS, 4, FAST, least - 1)


def test_a_slow_network_keeps_shards_inside_a_node() -> None:
    """AMSP's finding: state that fits a node's ranks is not gathered over the network."""
    slow = DpGroup(64, Fabric(8, 100e9, 4e9, 1e-6, 1e-3), overlap=0.0)
    budget = state_cost(LAYERS, 4, StateShards(8, 8, 8), slow).state_bytes
    shards, _ = choose_state(LAYERS, 4, slow, budget)
    assert shards.parameters in (1, 2, 4, 8)
    assert state_cost(LAYERS, 4, StateShards(64, 64, 64), slow).step_s > 2 * (
        state_cost(LAYERS, 4, shards, slow).step_s
    )
