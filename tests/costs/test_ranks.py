"""What each rank of the pipeline runs on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from merakc.costs.ranks import (
    fits,
    least_spare,
    rank_devices,
    rank_memory_bytes,
    stage_devices,
)
from merakc.ir.program import Inner, Mesh
from merakc.machines.cluster import NOMINAL_CPU, Hardware, Nodes
from merakc.machines.cluster_files import preset
from tests.machines.bare import bare

FAST, SLOW = bare(preset("h100").nodes[0].device), bare(preset("a100-40").nodes[0].device)
SMALL = replace(FAST, name="small", memory_bytes=1000)
LINKS = preset("h100").links
MIXED = Hardware("mixed", (Nodes(FAST, 4), Nodes(SLOW, 4)), LINKS)


@pytest.mark.parametrize(
    ("mesh", "names"),
    [
        (Mesh(dp=1, tp=4, pp=2), ["h100", "a100-40"]),
        (Mesh(dp=2, tp=1, pp=4), ["a100-40"] * 4),
        (Mesh(dp=2, tp=1, pp=4, inner="dp"), ["h100"] * 2 + ["a100-40"] * 2),
        (Mesh(dp=8), ["a100-40"]),
        (Mesh(tp=2, pp=2), ["h100", "h100"]),
        (Mesh(tp=4, pp=3), ["h100", "a100-40", "a100-40"]),  # of which there are not so many
    ],
)
def test_a_rank_is_as_fast_as_the_slowest_that_shares_its_stages(
    mesh: Mesh, names: list[str]
) -> None:
    assert [device.name for device in rank_devices(MIXED, mesh)] == names


def test_a_stage_has_the_device_of_its_rank() -> None:
    devices = stage_devices(MIXED.flat(), Mesh(tp=4, pp=2), (0, 1, 1, 0))
    assert [device.name for device in devices] == ["h100", "a100-40", "a100-40", "h100"]
    (nominal,) = stage_devices(NOMINAL_CPU, Mesh(), (0,))
    assert nominal.memory_bytes == NOMINAL_CPU.memory_bytes


@pytest.mark.parametrize("inner", ["pp", "dp"])
def test_a_rank_has_the_memory_of_the_smallest_that_shares_its_stages(inner: Inner) -> None:
    mixed = Hardware("mixed", (Nodes(SLOW, 2), Nodes(SMALL, 2)), LINKS)
    devices = rank_devices(mixed, Mesh(dp=2, pp=2, inner=inner))
    own, slow = (1000, SLOW.memory_bytes), "a100-40"
    expected = [(slow, own[0])] * 2 if inner == "pp" else [(slow, own[1]), ("small", own[0])]
    assert [(d.name, d.memory_bytes) for d in devices] == expected
    memory = rank_memory_bytes(mixed.flat(), Mesh(dp=2, pp=2, inner=inner))
    assert memory == tuple(size for _, size in expected)


def test_equal_nodes_give_equal_ranks_and_the_memory_of_the_cluster() -> None:
    same = replace(MIXED, nodes=(Nodes(FAST, 4), Nodes(FAST, 4)))
    assert rank_devices(same, Mesh(dp=2, pp=4)) == (FAST,) * 4
    assert rank_memory_bytes(replace(same.flat(), memory_bytes=7), Mesh(pp=2)) == (7, 7)
    assert rank_memory_bytes(replace(NOMINAL_CPU, memory_bytes=5), Mesh(pp=3)) == (5, 5, 5)


def test_each_rank_is_held_against_its_own_memory() -> None:
    mesh, cluster = Mesh(tp=4, pp=2), MIXED.flat()
    assert fits((80 * 10**9, 40 * 10**9), cluster, mesh)
    assert not fits((40 * 10**9, 80 * 10**9), cluster, mesh)
    assert least_spare((60, 30, 50), (80, 40, 80)) == 1
    assert least_spare((60, 60, 50), (80, 80, 80)) == 0


def test_tensors_get_what_nothing_else_holds() -> None:
    own = replace(FAST, memory_bytes=1000, context_bytes=100, communicator_bytes=50)
    own = replace(own, fragmentation=0.1)
    cluster = Hardware("alike", (Nodes(own, 8),), LINKS).flat()
    for mesh, left in ((Mesh(), 900), (Mesh(dp=4), 850), (Mesh(dp=2, tp=2, pp=2), 750)):
        assert rank_memory_bytes(cluster, mesh) == (int(0.9 * left),) * mesh.pp
    mixed = Hardware("mixed", (Nodes(own, 4), Nodes(SLOW, 4)), LINKS).flat()
    assert rank_memory_bytes(mixed, Mesh(tp=4, pp=2)) == (720, SLOW.memory_bytes)
    assert replace(own, memory_bytes=120).reserved_bytes(1) == 120  # and no more
