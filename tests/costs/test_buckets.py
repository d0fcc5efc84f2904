"""Seconds of buckets' collectives on a cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from merakc.analysis.buckets import BucketSpec
from merakc.costs.buckets import bucket_seconds, dp_group, tied_seconds
from merakc.costs.fabric import hardware_fabric
from merakc.ir.precision import NAMED
from merakc.ir.program import CollectiveKind, Mesh
from merakc.ir.state import StateShards
from merakc.machines.cluster import NOMINAL_CPU
from merakc.machines.cluster_files import preset

CLUSTER = replace(NOMINAL_CPU, link_latency_s=0.0, link_bytes_per_s=1e6)
KINDS = (
    CollectiveKind.REFRESH, CollectiveKind.GATHER, CollectiveKind.SCATTER, CollectiveKind.REDUCE,
)  # fmt: skip
MESH = Mesh(dp=4, tp=2, pp=2)


def spec(*counts: int, dtype: torch.dtype = torch.float32) -> BucketSpec:
    return BucketSpec("0:0", (0,), ("a",), dtype, 10**6, StateShards(*counts), True, False)


def seconds(bucket: BucketSpec, precision: str = "") -> list[float]:
    found = bucket_seconds([bucket], dp_group(MESH, CLUSTER), NAMED.get(precision))
    return [found["0:0", kind] for kind in KINDS]


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((1, 1, 1), (0, 0, 0, 6)),  # 2 x 3/4 of 4 MB
        ((1, 1, 4), (3, 0, 0, 3)),
        ((1, 4, 4), (3, 0, 3, 3)),
        ((4, 4, 4), (0, 3, 3, 3)),
        # gathered to two shards of 2 MB; scattered from whole ones.
        ((2, 2, 4), (1, 2, 2, 3)),
        ((2, 2, 2), (0, 2, 2, 2 + 2)),  # and over two replicas of 2 MB
    ],
)
def test_a_megabyte_a_second(counts: tuple[int, int, int], expected: tuple[int, ...]) -> None:
    assert seconds(spec(*counts)) == pytest.approx(expected)


def test_mixed_precision_gathers_and_scatters_16_bits_and_reduces_in_float32() -> None:
    assert seconds(spec(2, 2, 4), "bf16-mixed") == pytest.approx((0.5, 1, 1, 1.5))
    assert seconds(spec(1, 1, 1), "bf16-mixed") == pytest.approx((0, 0, 0, 6))
    assert seconds(spec(4, 4, 4, dtype=torch.float64)) == pytest.approx((0, 6, 6, 6))
    frozen = replace(spec(4, 4, 4, dtype=torch.bfloat16), is_trained=False)
    assert seconds(frozen, "bf16-mixed")[1] == pytest.approx(1.5)


def test_tied_gradients_are_added_up_over_their_holders() -> None:
    assert tied_seconds({}, MESH, CLUSTER) == 0
    assert tied_seconds({2: 10**6, 4: 10**6}, MESH, CLUSTER) == pytest.approx(1 + 1.5)


def test_nodes_are_known_where_the_hardware_is() -> None:
    hardware = preset("a100-80", 2)
    group = dp_group(MESH, hardware.flat())
    assert group.fabric == hardware_fabric(hardware, MESH.world_size)
    assert group.fabric.ranks_per_node == 8
    assert dp_group(MESH, CLUSTER).fabric.ranks_per_node == MESH.world_size


def test_experts_are_shared_by_dp_ranks_alone() -> None:
    """Of others those of ep take part, and bring more bytes together."""
    mesh = Mesh(dp=2, cp=2, experts=True)
    group = dp_group(mesh, CLUSTER)
    assert group.experts is not None
    assert (group.dp, group.stride) == (4, 1)
    assert (group.experts.dp, group.experts.stride) == (2, 2)
    assert dp_group(replace(mesh, experts=False), CLUSTER).experts is None
    other, own = spec(1, 1, 4), replace(spec(1, 1, 2), name="0:experts:0", of_experts=True)
    found = bucket_seconds([other, own], group)
    names = ("0:0", "0:experts:0")
    assert [found[n, CollectiveKind.REFRESH] for n in names] == pytest.approx([3, 2])
    assert [found[n, CollectiveKind.REDUCE] for n in names] == pytest.approx([3, 2])
