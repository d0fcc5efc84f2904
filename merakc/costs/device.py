"""Seconds of kernels on a device: a roofline whose ceilings depend on shapes, and launches.

A product is cut into tiles, which the multiprocessors work off in waves: a last wave that is not
full takes as long as a full one (NVIDIA, "Matrix Multiplication Background User's Guide", tile and
wave quantization). Libraries choose among tiles, and among ways to split a long sum where there are
too few; so the model takes the best of them. Nothing is faster than its memory traffic (Williams,
Waterman and Patterson, "Roofline", CACM 52(4), 2009).

Four constants of a device say how far programs are from its data sheet: `product_share`,
`traffic_share`, `launch_s` and the links' `link_share` (`merakc.machines.cluster`). All others here
are the same for every device.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

from merakc.costs.fabric import (
    Fabric,
    Group,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    axis_group,
    hardware_fabric,
    swap_seconds,
)
from merakc.costs.work.flops import ALL_TO_ALL
from merakc.costs.work.kernels import Kernel, KernelKind, Work
from merakc.kernels.collectives import AXES
from merakc.kernels.ring.swap import SWAP
from merakc.machines.cluster import Cluster, Device, Factors, Hardware, Profile
from merakc.machines.figures import DtypeName, Points
from merakc.machines.links import Host

# Tiles of a product that libraries choose from, rows by columns, and the share of the best rate
# that each reaches: smaller ones read their arguments more often (the guide above, figure 4).
TILES = (
    (256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (256, 64, 0.85), (64, 256, 0.85),
    (128, 64, 0.8), (64, 128, 0.8), (64, 64, 0.6),
)  # fmt: skip
# Filling and emptying the pipeline of a tile takes as long as so much of the sum.
FILL = 64
# The least part of a sum that is worth a multiprocessor of its own.
LEAST_PART = 256
# Attention in one kernel computes scores, a softmax and a product: what it reaches of a product's
# rate (FlashAttention-2, arXiv 2307.08691, figure 5: 0.6 to 0.75 of the best products).
ATTENTION_SHARE = 0.7
# A kernel that moves little takes this long nevertheless.
LEAST_S = 2e-6
# The device works while the host launches ahead, but not all of the time: the two times of a block
# add up to a norm between their maximum and their sum.
OVERLAP_NORM = 4.0
# What kernels and collectives lose that run at once (Galvatron, arXiv 2211.13878, measures 1.126 to
# 1.3 on GPUs with NVLink): the shorter of the two costs so much of its time.
CONTENTION = 0.126
PLAIN = Factors()
# Collectives of graphs that neither add up nor gather.
_SECONDS = dict.fromkeys(ALL_TO_ALL, all_to_all_seconds) | {SWAP: swap_seconds}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank works: its device, and the links to the others of its tp and cp groups.

    `tp` of None is a group of unknown size in a node, taken for a whole node. With `overlap` the
    collectives of both run beside other kernels, as where both are cut into parts. `factors` are
    those of measured steps; those of collectives are in the fabric. With `symmetric_memory` the
    ranks of the group read each other's. `host` is the memory beside the device, where it is known.
    """

    device: Device
    fabric: Fabric
    tp: int | None = None
    overlap: bool = False
    factors: Factors = PLAIN
    symmetric_memory: bool = False
    host: Host | None = None
    cp: int = 1

    def group(self, axis: str) -> Group:
        """The ranks of an axis: neighbours of tp, those of cp as many apart as tp has."""
        assert axis in AXES, axis
        if axis == "cp":
            return axis_group(self.cp, self.tp or 1, self.fabric)
        return axis_group(self.tp or self.fabric.ranks_per_node, 1, self.fabric)


def rank_place(
    hardware: Hardware,
    ranks: int,
    tp: int | None = None,
    *,
    cp: int = 1,
    overlap: bool = False,
    device: Device | None = None,
) -> Place:
    """Where each rank of a job works: on its device, or else the slowest, which all wait for."""
    fabric = hardware_fabric(hardware, ranks)
    symmetric = hardware.level(tp or fabric.ranks_per_node).symmetric_memory
    own = device or hardware.slowest
    return Place(own, fabric, tp, overlap, hardware.factors, symmetric, host=hardware.host, cp=cp)


def place_on(cluster: Cluster, tp: int, device: Device | None = None, *, cp: int = 1) -> Place:
    """Where the ranks of tp, and of cp, work on a cluster; of a nominal one, on a node of their
    own.
    """
    hardware = cluster.described(tp * cp)
    return rank_place(hardware, len(hardware.devices), tp, cp=cp, device=device)


def forward_seconds(work: Work, place: Place) -> float:
    """Seconds of a forward, corrected by measured steps."""
    return work_seconds(work.forward, place, place.factors.forward)


def backward_seconds(work: Work, place: Place) -> float:
    """Seconds of a backward, corrected by measured steps."""
    return work_seconds(work.backward, place, place.factors.backward)


def work_seconds(kernels: Mapping[Kernel, int], place: Place, factor: float = 1.0) -> float:
    """Seconds of kernels one after the other, launched by the host as they run.

    Those that are no collectives take `factor` times what formulas say, launches included.
    """
    if not kernels:
        return 0.0
    compute_s = wire_s = 0.0
    for kernel, count in kernels.items():
        if kernel.kind is KernelKind.COLLECTIVE:
            wire_s += count * collective_seconds(kernel, place)
        else:
            compute_s += count * factor * kernel_seconds(kernel, place.device)
    device_s = compute_s + wire_s
    if place.overlap:
        device_s = max(compute_s, wire_s) + CONTENTION * min(compute_s, wire_s)
    return launched(device_s, factor * sum(kernels.values()) * place.device.launch_s)


def launched(device_s: float, host_s: float) -> float:
    """Seconds of what the device takes so long for while the host takes so long to launch it."""
    longer, shorter = max(device_s, host_s), min(device_s, host_s)
    if not longer:
        return 0.0
    together: float = (1.0 + (shorter / longer) ** OVERLAP_NORM) ** (1.0 / OVERLAP_NORM)
    return longer * together


def collective_seconds(kernel: Kernel, place: Place) -> float:
    """Seconds of a collective of the graph over the ranks of its axis."""
    group, fabric = place.group(kernel.axis), place.fabric
    if "all_reduce" in kernel.op:
        return all_reduce_seconds(kernel.traffic_bytes, group, fabric)
    of_op = _SECONDS.get(kernel.op, all_gather_seconds)
    return of_op(kernel.traffic_bytes / fabric.gather_share, group, fabric)


def traffic_seconds(size_bytes: float, device: Device) -> float:
    """Seconds of reading and writing so many bytes in large pieces."""
    if device.profile and device.profile.traffic and size_bytes > 0:
        return size_bytes / measured_rate(device.profile.traffic, size_bytes)
    return size_bytes / (device.bytes_per_s * device.traffic_share)


def measured_rate(points: Points, size: float) -> float:
    """The rate at a size between those that were measured, on logarithmic axes; beyond them, that
    of the nearest.
    """
    at = bisect_right(points, size, key=lambda point: point[0])
    if at in (0, len(points)):
        return points[max(at - 1, 0)][1]
    (small, slow), (large, fast) = points[at - 1], points[at]
    part: float = math.log(size / small) / math.log(large / small)
    found: float = slow * (fast / slow) ** part
    return found


@lru_cache(maxsize=1 << 16)
def kernel_seconds(kernel: Kernel, device: Device) -> float:
    """Seconds of a kernel that is no collective, on an otherwise idle device."""
    traffic_s = traffic_seconds(kernel.traffic_bytes, device)
    rate = device.flops_per_s(kernel.dtype)
    known = device.profile or Profile()
    match kernel.kind:
        case KernelKind.PRODUCT:
            seconds = _product_seconds(kernel, device.units, rate)
            return max(seconds * _off(kernel, device, rate), traffic_s)
        case KernelKind.ATTENTION:
            points = known.attention.get(cast(DtypeName, kernel.dtype))
            if points:
                return kernel.flops / measured_rate(points, kernel.flops)
            return max(_attention_seconds(kernel, device.units, rate), traffic_s)
        case _:
            return traffic_s + (0.0 if known.traffic else LEAST_S)


def total_flops(kernels: Counter[Kernel]) -> int:
    """Multiplications and additions of all kernels."""
    return sum(kernel.flops * count for kernel, count in kernels.items())


def _off(kernel: Kernel, device: Device, rate: float) -> float:
    """What a product of as many flops, of square matrices, was measured to take, against what the
    formula says of it: the formula is left to tell of the shape.
    """
    measured = device.profile.products if device.profile else {}
    points = measured.get(cast(DtypeName, kernel.dtype))
    if not points or not kernel.flops:
        return 1.0
    side = max(round((kernel.flops / 2) ** (1 / 3)), 1)
    square = kernel._replace(flops=2 * side**3, shape=(1, side, side, side))
    measured_s = square.flops / measured_rate(points, square.flops)
    return measured_s / _product_seconds(square, device.units, rate)


def _product_seconds(kernel: Kernel, units: int, rate: float) -> float:
    batch, m, n, k = kernel.shape
    if not batch or units == 1:
        return kernel.flops / rate
    best = float("inf")
    for rows, columns, share in TILES:
        tiles = batch * -(-m // rows) * -(-n // columns)
        flops = 2 * rows * columns * units / (rate * share)  # of one wave, by length of the sum
        waves = -(-tiles // units)
        best = min(best, waves * (k + FILL) * flops)
        if tiles < units:
            parts = min(units // tiles, max(1, k // LEAST_PART))
            best = min(best, (k / parts + FILL) * flops)
    return best


def _attention_seconds(kernel: Kernel, units: int, rate: float) -> float:
    """Blocks of 128 rows of each head are worked off in waves."""
    heads, rows, _, _ = kernel.shape
    blocks = heads * -(-rows // 128)
    full = -(-blocks // units) * units / blocks if blocks and units > 1 else 1.0
    return kernel.flops * full / (rate * ATTENTION_SHARE)
