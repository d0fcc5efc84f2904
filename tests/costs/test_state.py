"""What sharded state costs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from merakc.costs.fabric import Fabric
from merakc.costs.state import DpGroup, Layer, StateCost, in_buckets, state_bytes, state_cost
from merakc.ir.state import StateShards, lattice

FABRIC = Fabric(8, 100e9, 40e9, 0.0, 0.0)
LAYERS = [Layer(10**9, 1.0, 2.0)] * 4


def cost(
    counts: tuple[int, int, int], *, dp: int = 8, micro_batches: int = 1, overlap: float = 1.0
) -> StateCost:
    group = DpGroup(dp, FABRIC, overlap=overlap)
    return state_cost(LAYERS, micro_batches, StateShards(*counts), group)


@pytest.mark.parametrize(
    ("counts", "gigabytes"),
    [((1, 1, 1), 120), ((1, 1, 64), 31.4), ((1, 64, 64), 16.6), ((64, 64, 64), 1.88)],
)
def test_the_figures_of_zero(counts: tuple[int, int, int], gigabytes: float) -> None:
    """Rajbhandari et al. 2020, figure 1: 7.5 billion parameters on 64 ranks."""
    found = state_bytes(7_500_000_000, StateShards(*counts)) / 1e9
    assert found == pytest.approx(gigabytes, rel=5e-3)


def test_an_odd_parameter_is_padded() -> None:
    assert state_bytes(9, StateShards(1, 1, 4)) == 9 * 2 + 9 * 2 + 3 * 12


def test_one_rank_communicates_nothing() -> None:
    found = cost((1, 1, 1), dp=1, micro_batches=3)
    assert (found.step_s, found.exposed_s, found.communication_s) == (3 * 4 * 3.0, 0.0, 0.0)


def gather_s(shards: int) -> float:
    return (shards - 1) / shards * 2e9 / 100e9


@pytest.mark.parametrize(
    ("counts", "collectives"),
    [
        ((1, 1, 1), 4 * 2),  # an all-reduce: twice the bytes
        ((1, 1, 8), 4 * 2),  # scattered, and gathered after the optimizer
        ((1, 8, 8), 4 * 4),  # scattered after each of three micro-batches
        # Gathered in forward and backward, but for two at each of five turns, and scattered.
        ((8, 8, 8), 6 * 4 - 2 * 5 + 3 * 4),
    ],
)
def test_without_overlap_all_of_it_is_exposed(
    counts: tuple[int, int, int], collectives: int
) -> None:
    found = cost(counts, micro_batches=3, overlap=0.0)
    assert found.communication_s == pytest.approx(collectives * gather_s(8))
    assert found.exposed_s == pytest.approx(found.communication_s)
    assert found.step_s == pytest.approx(36 + found.exposed_s)


def test_what_overlaps_is_hidden_but_for_the_ends() -> None:
    zero1, zero3 = cost((1, 1, 8), micro_batches=3), cost((8, 8, 8), micro_batches=3)
    # The first layer's gather and its reduction at the end have nothing to hide behind.
    assert zero1.exposed_s == pytest.approx(2 * gather_s(8))
    assert zero3.exposed_s == pytest.approx(2 * gather_s(8))


def test_a_slow_network_shows() -> None:
    slow = DpGroup(64, Fabric(8, 100e9, 1e9, 0.0, 0.0))
    near, far = (
        state_cost(LAYERS, 1, StateShards(1, 1, shards), slow).communication_s for shards in (8, 64)
    )
    # 8 GB over a node's network twice in both: the nodes' shards are added up, or are gathered.
    network_s = 2 * 8e9 / 1e9
    assert near == pytest.approx(network_s * 7 / 8 + 8 * gather_s(8))
    assert far == pytest.approx(network_s * 63 / 64)


def test_more_shards_hold_less() -> None:
    held = {s: cost((s.parameters, s.gradients, s.optimizer)).state_bytes for s in lattice(8)}
    assert min(held, key=held.__getitem__) == StateShards(8, 8, 8)
    assert max(held, key=held.__getitem__) == StateShards(1, 1, 1)
    assert math.isclose(held[StateShards(1, 1, 1)], 16 * 4e9)


def test_the_optimizer_reads_and_writes_its_shard() -> None:
    group = DpGroup(8, FABRIC)
    found = state_cost(LAYERS, 1, StateShards(1, 1, 8), group, optimizer_bytes_per_s=1e12)
    assert found.step_s - cost((1, 1, 8)).step_s == pytest.approx(2 * 12 * 4e9 / 8 / 1e12)


def test_experts_are_in_buckets_of_their_own() -> None:
    layers = [Layer(3, 1.0, 2.0), Layer(5, 1.0, 2.0, of_experts=True)] * 2
    found = in_buckets(layers, 4)
    assert found == [Layer(10, 0.0, 0.0, of_experts=True), Layer(6, 4.0, 8.0)]
    millions = [replace(layer, parameters=layer.parameters << 20) for layer in layers] * 8
    found = in_buckets(millions, 4)
    for of_experts, count in ((False, 3), (True, 5)):
        own = [layer.parameters for layer in found if layer.of_experts is of_experts]
        assert sum(own) == 16 * count << 20
        assert max(own) <= 25 << 18
    assert sum(layer.forward_s for layer in found) == 32


def test_experts_are_gathered_and_reduced_over_their_own_ranks() -> None:
    own = DpGroup(2, FABRIC)
    group = DpGroup(8, FABRIC, experts=own)
    shards = StateShards(1, 8, 8)
    assert group.of(shards, of_experts=False) == (shards, group)
    assert group.of(shards, of_experts=True) == (StateShards(1, 2, 2), own)
    assert own.of(shards, of_experts=True) == (shards, own)
    layers = [replace(layer, of_experts=True) for layer in LAYERS]
    alone = state_cost(LAYERS, 2, StateShards(1, 2, 2), own)
    found = state_cost(layers, 2, shards, group)
    assert (found.step_s, found.communication_s) == (alone.step_s, alone.communication_s)
    assert found.communication_s != state_cost(LAYERS, 2, shards, group).communication_s
