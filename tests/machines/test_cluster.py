"""A cluster is a value: equal by what it says, and no one changes it."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

from merakc.machines.cluster import NOMINAL_CPU, Cluster, Device, Hardware, Nodes, Sharing
from merakc.machines.links import Level

CLUSTER = Cluster("two cores", 1e11, 2e10, 5e-6, 8 << 30, 1e-4, 1.25e8)


def test_a_cluster_is_a_value() -> None:
    same = dataclasses.replace(CLUSTER)
    assert same == CLUSTER
    assert hash(same) == hash(CLUSTER)
    assert dataclasses.replace(CLUSTER, memory_bytes=1) != CLUSTER
    with pytest.raises(dataclasses.FrozenInstanceError):
        CLUSTER.memory_bytes = 1  # type: ignore[misc]


DEVICE = Device("fast", {"float32": 1e14, "bfloat16": 2e14}, 2e12, 80 << 30, product_share=0.5)
SLOW = dataclasses.replace(DEVICE, name="slow", peak_flops_per_s={"bfloat16": 1e14})
LEVELS = (Level("inside", 4, 3e11, 1e-6), Level("outside", 64, 1e11, 1e-5, shared_by=4))
HARDWARE = Hardware("mixed", (Nodes(DEVICE, 4, 2), Nodes(SLOW, 4)), LEVELS, link_share=0.5)


def test_a_dtype_that_is_not_listed_runs_at_the_slowest_rate() -> None:
    assert DEVICE.flops_per_s("bfloat16") == 1e14
    assert DEVICE.flops_per_s("float64") == DEVICE.flops_per_s("float32") == 0.5e14


def test_devices_stand_in_the_order_of_ranks() -> None:
    assert [d.name for d in HARDWARE.devices] == ["fast"] * 8 + ["slow"] * 4
    assert HARDWARE.slowest is SLOW
    assert HARDWARE.is_mixed
    assert not dataclasses.replace(HARDWARE, nodes=(Nodes(SLOW, 4), Nodes(SLOW, 2))).is_mixed


def test_the_innermost_level_that_joins_them() -> None:
    assert [HARDWARE.level(n).name for n in (1, 4, 5, 64, 100)] == [
        "inside", "inside", "outside", "outside", "outside",
    ]  # fmt: skip


def test_the_flat_view_is_of_the_slowest() -> None:
    flat = HARDWARE.flat()
    assert flat.flops_per_s == SLOW.flops_per_s("bfloat16")
    assert flat.bytes_per_s == 2e12 * DEVICE.traffic_share
    assert flat.link_bytes_per_s == 0.5 * 1e11 / 4
    assert flat.link_latency_s == 1e-5
    assert flat.hardware is HARDWARE
    assert hash(flat) == hash(HARDWARE.flat())


def test_memory_is_symmetric_as_far_as_the_level_that_joins_the_ranks_says() -> None:
    inner = dataclasses.replace(LEVELS[0], symmetric_memory=True)
    hardware = dataclasses.replace(HARDWARE, links=(inner, LEVELS[1]))
    flat = hardware.flat()
    assert not flat.symmetric_memory
    assert flat.joining(4).symmetric_memory
    assert not flat.joining(5).symmetric_memory
    alone = dataclasses.replace(CLUSTER, symmetric_memory=True)
    assert alone.described(4).flat().symmetric_memory


def test_what_shares_cores_is_a_node() -> None:
    sharing = Sharing((1.0, 0.9), 4)
    cluster = replace(NOMINAL_CPU, sharing=sharing)
    for ranks, nodes in ((4, 1), (8, 2), (2, 1), (6, 1)):
        found = cluster.described(ranks)
        assert len(found.devices) == ranks
        assert found.nodes[0].count == nodes
    assert cluster.described(8).sharing == sharing
    assert NOMINAL_CPU.described(8).nodes[0].count == 1
