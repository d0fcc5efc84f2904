"""Seconds of the collectives of buckets, on a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from merakc.analysis.buckets import BucketSpec
from merakc.costs.fabric import Fabric, Group, all_reduce_seconds, hardware_fabric
from merakc.costs.state import DpGroup, Precision, collective_seconds
from merakc.ir import precision as ir
from merakc.ir.program import CollectiveKind, Mesh
from merakc.machines.cluster import Cluster
from merakc.machines.links import Host


def dp_group(mesh: Mesh, cluster: Cluster) -> DpGroup:
    """The ranks of a mesh that share their state, on a cluster: one node where it says nothing of
    nodes.
    """
    return state_group(mesh, mesh_fabric(mesh, cluster))


def state_group(mesh: Mesh, fabric: Fabric, overlap: float = 1.0) -> DpGroup:
    """The same, and those that share the state of experts, by what links them."""
    alone = mesh.sharers(of_experts=True)
    experts = DpGroup(alone.state_ranks, fabric, alone.state_stride, overlap)
    every = DpGroup(mesh.state_ranks, fabric, mesh.state_stride, overlap)
    return replace(every, experts=experts) if mesh.experts else every


def mesh_fabric(mesh: Mesh, cluster: Cluster) -> Fabric:
    """The links of a cluster that the ranks of a mesh use."""
    return hardware_fabric(cluster.described(mesh.world_size), mesh.world_size)


def bucket_seconds(
    buckets: Iterable[BucketSpec],
    group: DpGroup,
    precision: ir.Precision | None = None,
    host: Host | None = None,
) -> dict[tuple[str, CollectiveKind], float]:
    """Seconds of each collective of each bucket.

    What is gathered travels in the dtype that is computed with, gradients in their own where they
    are scattered, and in float32 or wider where they are reduced whole. What is fetched comes from
    the `host`; gradients go there of what it updates.
    """
    found: dict[tuple[str, CollectiveKind], float] = {}
    for spec in buckets:
        gradient = precision.dtype("gradients") if precision else spec.dtype
        computed = precision.dtype("compute") if precision and spec.is_trained else spec.dtype
        if spec.shards.optimizer == 1:
            gradient = torch.promote_types(gradient, torch.float32)
        sizes = Precision(computed.itemsize, gradient.itemsize, 0)
        _, ranks = group.of(spec.shards, of_experts=spec.of_experts)
        seconds = collective_seconds(spec.numel, spec.shards, ranks, sizes)
        found |= {(spec.name, kind): value for kind, value in seconds.items()}
        if spec.fetched and host is not None:
            own_bytes = computed.itemsize * spec.numel / spec.shards.parameters
            found[spec.name, CollectiveKind.GATHER] += host.up.seconds(own_bytes)
        if spec.on_host and host is not None:
            own_bytes = spec.dtype.itemsize * spec.numel / spec.shards.optimizer
            found[spec.name, CollectiveKind.REDUCE] += host.down.seconds(own_bytes)
    return found


def tied_seconds(shared_bytes: Mapping[int, int], mesh: Mesh, cluster: Cluster) -> float:
    """Seconds of adding up gradients over so many ranks of the pipeline each, bytes by ranks."""
    fabric = mesh_fabric(mesh, cluster)
    return sum(
        all_reduce_seconds(size_bytes, Group(ranks, ranks), fabric)
        for ranks, size_bytes in shared_bytes.items()
    )
