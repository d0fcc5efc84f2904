"""Seconds of kernels on a device."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from merakc.cluster import Device
from merakc.costs.device import (
    ATTENTION_SHARE,
    CONTENTION,
    FILL,
    LEAST_S,
    Place,
    kernel_seconds,
    total_flops,
    work_seconds,
)
from merakc.costs.fabric import Fabric, all_reduce_seconds
from merakc.costs.kernels import ALL_REDUCE, Kernel, KernelKind

UNITS = 100
DEVICE = Device(
    "d", {"bfloat16": 1e14, "float32": 1e13}, 1e12, 1, UNITS, product_share=0.5,
    traffic_share=0.5, launch_s=0.0,
)  # fmt: skip
FABRIC = Fabric(8, 100e9, 40e9, 1e-6, 1e-5)
PLACE = Place(DEVICE, FABRIC, 4)


def product(m: int, n: int, k: int, batch: int = 1, dtype: str = "bfloat16") -> Kernel:
    return Kernel(KernelKind.PRODUCT, 2 * batch * m * n * k, 0, (batch, m, n, k), dtype)


def share(kernel: Kernel) -> float:
    """Of the peak rate."""
    return kernel.flops / kernel_seconds(kernel, DEVICE) / 1e14


def test_large_products_reach_their_share() -> None:
    assert share(product(100 * 256, 128 * 64, 1 << 16)) == pytest.approx(0.5, rel=2e-3)
    assert share(product(1000, 64, 64)) < 0.25
    assert kernel_seconds(product(2560, 1280, 4096, dtype="float32"), DEVICE) == pytest.approx(
        10 * kernel_seconds(product(2560, 1280, 4096), DEVICE)
    )


def test_a_wave_that_is_not_full_takes_as_long_as_a_full_one() -> None:
    tall = 256 * 10, 128 * 10, 1 << 20  # a hundred of the largest tiles
    full = kernel_seconds(product(*tall), DEVICE)
    more = kernel_seconds(product(256 * 10, 128 * 10 + 1, 1 << 20), DEVICE)
    assert full == pytest.approx(2 * 2560 * 1280 * (tall[2] + FILL) / 0.5e14)
    assert more > 1.05 * full
    assert kernel_seconds(product(256, 128, 1 << 20, batch=100), DEVICE) == full


def test_a_long_sum_is_split_where_there_are_few_tiles() -> None:
    assert share(product(256, 128, 1 << 20)) > 0.4


def test_a_product_is_no_faster_than_its_traffic() -> None:
    moved = replace(product(64, 64, 64), traffic_bytes=10**9)
    assert kernel_seconds(moved, DEVICE) == 1e9 / 0.5e12


def test_traffic() -> None:
    kernel = Kernel(KernelKind.TRAFFIC, 0, 10**9)
    assert kernel_seconds(kernel, DEVICE) == pytest.approx(2e-3 + LEAST_S)


def test_attention_runs_in_waves_of_rows() -> None:
    kernel = Kernel(KernelKind.ATTENTION, 10**12, 0, (50, 256, 64, 256))
    assert kernel_seconds(kernel, DEVICE) == pytest.approx(1e12 / 0.5e14 / ATTENTION_SHARE)
    half = replace(kernel, shape=(25, 256, 64, 256))
    assert kernel_seconds(half, DEVICE) == pytest.approx(2e12 / 0.5e14 / ATTENTION_SHARE)


def test_products_that_are_none_of_matrices_have_the_rate_alone() -> None:
    kernel = Kernel(KernelKind.PRODUCT, 10**12)
    assert kernel_seconds(kernel, DEVICE) == pytest.approx(1e12 / 0.5e14)


def test_the_host_and_the_device_work_side_by_side() -> None:
    kernels = Counter({Kernel(KernelKind.TRAFFIC, 0, 10**9): 10})
    device_s = 10 * kernel_seconds(next(iter(kernels)), DEVICE)
    assert work_seconds(kernels, PLACE) == pytest.approx(device_s)

    def launching(seconds: float) -> float:
        place = replace(PLACE, device=replace(DEVICE, launch_s=seconds))
        return work_seconds(kernels, place)

    assert launching(device_s / 100) == pytest.approx(device_s, rel=1e-3)
    assert launching(device_s) == pytest.approx(10 * device_s, rel=1e-3)
    assert device_s < launching(device_s / 10) < 2 * device_s
    assert work_seconds(Counter(), PLACE) == 0


def test_collectives_of_tp_come_on_top_or_run_beside() -> None:
    reduce = Kernel(KernelKind.COLLECTIVE, 0, 10**9, op=ALL_REDUCE)
    compute = Kernel(KernelKind.TRAFFIC, 0, 10**10)
    kernels = Counter({reduce: 2, compute: 1})
    wire_s = 2 * all_reduce_seconds(1e9, PLACE.group, FABRIC)
    compute_s = kernel_seconds(compute, DEVICE)
    assert work_seconds(kernels, PLACE) == pytest.approx(wire_s + compute_s)
    beside = work_seconds(kernels, replace(PLACE, overlap=True))
    longer, shorter = max(wire_s, compute_s), min(wire_s, compute_s)
    assert beside == pytest.approx(longer + CONTENTION * shorter)


def test_a_group_of_unknown_size_is_a_node() -> None:
    assert Place(DEVICE, FABRIC).group == Place(DEVICE, FABRIC, 8).group
    assert PLACE.group.size == 4


def test_total_flops() -> None:
    assert total_flops(Counter({product(2, 3, 4): 5})) == 5 * 48
