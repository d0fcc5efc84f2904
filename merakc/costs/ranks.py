"""What each rank of the pipeline runs on, where nodes are of different kinds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from merakc.ir.program import Mesh
from merakc.machines.cluster import Cluster, Device, Hardware, slowest_of


@lru_cache(maxsize=1 << 10)
def rank_devices(hardware: Hardware, mesh: Mesh) -> tuple[Device, ...]:
    """The device of each pipeline rank: the slowest of its dp and tp ranks, which wait for each
    other, with the least memory of any.

    Ranks beyond the devices that there are have the slowest.
    """
    if not hardware.is_mixed:
        return (hardware.slowest,) * mesh.pp
    devices = hardware.devices
    devices += (hardware.slowest,) * (mesh.world_size - len(devices))
    held: list[list[Device]] = [[] for _ in range(mesh.pp)]
    for rank in range(mesh.world_size):
        held[mesh.coordinates(rank)[1]].append(devices[rank])
    return tuple(
        replace(slowest_of(own), memory_bytes=min(d.memory_bytes for d in own)) for own in held
    )


def stage_devices(cluster: Cluster, mesh: Mesh, rank_of: Sequence[int]) -> tuple[Device, ...]:
    """The device of each stage, by the pipeline ranks that have them."""
    devices = rank_devices(cluster.described(mesh.world_size), mesh)
    return tuple(devices[rank] for rank in rank_of)


def reserved_bytes(device: Device, mesh: Mesh) -> int:
    """What a rank on such a device has beside its tensors: it calls a communicator of each axis of
    more than one rank.
    """
    return device.reserved_bytes(sum(ranks > 1 for ranks in (mesh.dp, mesh.cp, mesh.tp, mesh.pp)))


def rank_memory_bytes(cluster: Cluster, mesh: Mesh) -> tuple[int, ...]:
    """The memory of each pipeline rank for its tensors: the least of its dp and tp ranks."""
    if cluster.hardware is None:
        return (cluster.memory_bytes,) * mesh.pp
    if not cluster.hardware.is_mixed:
        return (cluster.memory_bytes - reserved_bytes(cluster.hardware.slowest, mesh),) * mesh.pp
    devices = rank_devices(cluster.hardware, mesh)
    return tuple(device.memory_bytes - reserved_bytes(device, mesh) for device in devices)


def least_spare(peak_bytes: Sequence[int], memory_bytes: Sequence[int]) -> int:
    """The rank that has least memory to spare at its peak, or lacks most."""
    spare = [have - need for need, have in zip(peak_bytes, memory_bytes, strict=True)]
    return spare.index(min(spare))


def fits(peak_bytes: Sequence[int], cluster: Cluster, mesh: Mesh) -> bool:
    """Whether each pipeline rank has the memory for its peak."""
    memory_bytes = rank_memory_bytes(cluster, mesh)
    return all(need <= have for need, have in zip(peak_bytes, memory_bytes, strict=True))
