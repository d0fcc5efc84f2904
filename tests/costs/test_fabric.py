"""The alpha-beta model on nodes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from merakc.costs.fabric import (
    Fabric,
    Group,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    axis_group,
    hardware_fabric,
    message_seconds,
    shard_group,
    swap_seconds,
)
from merakc.machines.cluster import Device, Factors, Hardware, Nodes
from merakc.machines.links import Level

FABRIC = Fabric(8, 100e9, 40e9, 1e-6, 1e-5)


def test_groups_lie_inside_a_node_first() -> None:
    assert shard_group(4, 1, FABRIC) == Group(4, 4, 2)
    assert shard_group(8, 1, FABRIC) == Group(8, 8, 1)
    assert shard_group(32, 1, FABRIC) == Group(32, 8, 1)
    # From 4 to 16 shards: members are 4 ranks apart, two of them in each node.
    assert shard_group(16, 4, FABRIC) == Group(4, 2, 4)
    # Replicas of 8 shards: one of each node.
    assert shard_group(64, 8, FABRIC) == Group(8, 1, 8)
    # tp ranks stand between neighbours.
    assert shard_group(8, 1, FABRIC, stride=4) == Group(8, 2, 4)


def test_one_rank_sends_nothing() -> None:
    assert all_gather_seconds(1e9, Group(1), FABRIC) == 0
    assert all_reduce_seconds(1e9, Group(1), FABRIC) == 0


def test_a_ring_inside_a_node() -> None:
    assert all_gather_seconds(8e9, Group(8, 8), FABRIC) == pytest.approx(7e-6 + 7e9 / 100e9)


def test_a_ring_has_one_step_from_each_node_to_the_next() -> None:
    found = all_gather_seconds(0, Group(2048, 8), FABRIC)
    assert found == pytest.approx(255 * 1e-5 + 1792 * 1e-6)


def test_groups_of_a_node_share_its_network() -> None:
    alone = all_gather_seconds(8e9, Group(4, 2, 1), FABRIC)
    shared = all_gather_seconds(8e9, Group(4, 2, 4), FABRIC)
    latency_s = 1e-5 + 2 * 1e-6  # one step from node to node, two inside
    assert alone == pytest.approx(latency_s + 6e9 / 40e9)
    assert shared == pytest.approx(latency_s + 6e9 / 10e9)


def test_an_all_reduce_is_a_ring_or_a_tree() -> None:
    group = Group(1024, 8)
    large = all_reduce_seconds(1e13, group, FABRIC)
    assert large == pytest.approx(2 * all_gather_seconds(1e13, group, FABRIC))
    latency_s = 3 * 1e-6 + math.log2(128) * 1e-5  # trees inside nodes, and one of them
    assert all_reduce_seconds(1e3, group, FABRIC) == pytest.approx(2 * latency_s + 2e3 / 40e9)


LINKS = (Level("inside", 4, 3e11, 1e-6), Level("rack", 16, 1e11, 1e-5, shared_by=4),
         Level("racks", 64, 2e10, 1e-4, shared_by=4))  # fmt: skip
HARDWARE = Hardware("h", (Nodes(Device("d", {"float32": 1.0}, 1.0, 1), 4, 8),), LINKS, 0.5)


@pytest.mark.parametrize(
    ("ranks", "network", "latency"), [(16, 1e11, 1e-5), (17, 2e10, 1e-4), (32, 2e10, 1e-4)]
)
def test_a_job_uses_the_links_that_it_spans(ranks: int, network: float, latency: float) -> None:
    found = hardware_fabric(HARDWARE, ranks)
    assert found == Fabric(4, 0.5 * 3e11, 0.5 * network, 1e-6, latency)


def test_a_job_in_a_node_uses_its_links_alone() -> None:
    assert hardware_fabric(HARDWARE, 2) == Fabric(4, 1.5e11, 6e11, 1e-6, 1e-6)


def test_messages_of_a_node_share_its_network() -> None:
    assert message_seconds(1e9, FABRIC, is_local=True) == pytest.approx(1e-6 + 1e9 / 100e9)
    assert message_seconds(1e9, FABRIC, is_local=False) == pytest.approx(1e-5 + 8e9 / 40e9)


def test_the_group_of_an_axis() -> None:
    assert axis_group(4, 1, FABRIC) == Group(4, 4, 2)
    assert axis_group(16, 8, FABRIC) == Group(16, 1, 8)


def test_measured_steps_correct_links() -> None:
    slow = replace(HARDWARE, factors=Factors(collectives=2.0))
    before, after = (hardware_fabric(own, 32) for own in (HARDWARE, slow))
    group = axis_group(16, 1, before)
    assert all_reduce_seconds(1e9, group, after) == pytest.approx(
        2 * all_reduce_seconds(1e9, group, before)
    )
    assert message_seconds(1e6, after, is_local=True) == pytest.approx(
        2 * message_seconds(1e6, before, is_local=True)
    )
    flat = replace(HARDWARE.flat("float32"), hardware=slow).joining(32)
    assert flat.link_latency_s == 2 * HARDWARE.flat("float32").joining(32).link_latency_s
    assert flat.link_bytes_per_s == HARDWARE.flat("float32").joining(32).link_bytes_per_s / 2


def test_swaps_between_nodes_leave_them_all_at_once() -> None:
    inside, across = axis_group(4, 1, FABRIC), axis_group(16, 1, FABRIC)
    assert swap_seconds(1e9, inside, FABRIC) == pytest.approx(1e-6 + 1e9 / 100e9)
    assert swap_seconds(1e9, across, FABRIC) == pytest.approx(1e-5 + 8e9 / 40e9)
    assert swap_seconds(1e9, axis_group(16, 8, FABRIC), FABRIC) == pytest.approx(1e-5 + 8e9 / 40e9)
    assert swap_seconds(1e9, axis_group(1, 1, FABRIC), FABRIC) == 0


@pytest.mark.parametrize(
    ("group", "latency_s", "wire_s"),
    [
        (Group(1), 0, 0),
        (Group(8, 8), 7e-6, 14e9 / 100e9),  # 7 parts of 2e9 bytes through a rank's own links
        # Each of 8 ranks sends 8 of 16 parts of 1e9 bytes to the other node.
        (Group(16, 8), 14e-6 + 1e-5, 8 * 8e9 / 40e9),
        # 4 groups, of which each has 2 of its 4 ranks in a node: all 8 send 2 parts of 4e9 away.
        (Group(4, 2, 4), 2e-6 + 1e-5, 8 * 8e9 / 40e9),
        (Group(8, 1, 8), 7e-5, 8 * 14e9 / 40e9),
        (Group(2, 1, 1), 1e-5, 8e9 / 40e9),
    ],
)
def test_all_ranks_of_a_node_send_to_all_others_at_once(
    group: Group, latency_s: float, wire_s: float
) -> None:
    assert all_to_all_seconds(16e9, group, FABRIC) == pytest.approx(latency_s + wire_s)


def test_what_stays_in_a_node_travels_beside_what_leaves_it() -> None:
    slow = replace(FABRIC, local_bytes_per_s=4e9)  # less than a rank's share of the network, 5e9
    # 7 parts stay in the node, 8 leave it: both at the rate of the rank's links.
    assert all_to_all_seconds(16e9, Group(16, 8), slow) == pytest.approx(24e-6 + 8e9 / 4e9)
    assert all_to_all_seconds(16e9, Group(10, 8), slow) == pytest.approx(18e-6 + 7 * 1.6e9 / 4e9)
