"""Seconds of kernels on a device."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from merakc.costs.device import (
    ATTENTION_SHARE,
    CONTENTION,
    FILL,
    LEAST_S,
    Place,
    backward_seconds,
    forward_seconds,
    kernel_seconds,
    measured_rate,
    total_flops,
    traffic_seconds,
    work_seconds,
)
from merakc.costs.fabric import Fabric, all_reduce_seconds
from merakc.costs.work.flops import ALL_TO_ALL
from merakc.costs.work.kernels import ALL_REDUCE, Kernel, KernelKind, Work
from merakc.machines.cluster import Device, Factors, Profile

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
    moved = product(64, 64, 64)._replace(traffic_bytes=10**9)
    assert kernel_seconds(moved, DEVICE) == 1e9 / 0.5e12


def test_traffic() -> None:
    kernel = Kernel(KernelKind.TRAFFIC, 0, 10**9)
    assert kernel_seconds(kernel, DEVICE) == pytest.approx(2e-3 + LEAST_S)


def test_attention_runs_in_waves_of_rows() -> None:
    kernel = Kernel(KernelKind.ATTENTION, 10**12, 0, (50, 256, 64, 256))
    assert kernel_seconds(kernel, DEVICE) == pytest.approx(1e12 / 0.5e14 / ATTENTION_SHARE)
    half = kernel._replace(shape=(25, 256, 64, 256))
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
    reduce = Kernel(KernelKind.COLLECTIVE, 0, 10**9, op=ALL_REDUCE, axis="tp")
    compute = Kernel(KernelKind.TRAFFIC, 0, 10**10)
    kernels = Counter({reduce: 2, compute: 1})
    wire_s = 2 * all_reduce_seconds(1e9, PLACE.group("tp"), FABRIC)
    compute_s = kernel_seconds(compute, DEVICE)
    assert work_seconds(kernels, PLACE) == pytest.approx(wire_s + compute_s)
    beside = work_seconds(kernels, replace(PLACE, overlap=True))
    longer, shorter = max(wire_s, compute_s), min(wire_s, compute_s)
    assert beside == pytest.approx(longer + CONTENTION * shorter)


@pytest.mark.parametrize(
    ("op", "wire_s"),
    [
        # Of 16 parts of 1e9 bytes each of 8 ranks sends 8 to the other node, at 40e9 together.
        *[(op, 1.6) for op in ALL_TO_ALL],
        ("merakc.all_gather.default", 0.375),  # one rank of a node sends 15 parts to the other
        ("merakc.swap.default", 3.2),  # all ranks send all that they have
    ],
)
def test_links_between_nodes_carry_what_their_ranks_send(op: str, wire_s: float) -> None:
    sent = Kernel(KernelKind.COLLECTIVE, 0, 16 * 10**9, op=op, axis="cp")
    seconds = work_seconds({sent: 1}, Place(DEVICE, FABRIC, 1, cp=16))
    assert seconds == pytest.approx(wire_s, rel=1e-3)  # beside some latencies


def test_a_group_of_unknown_size_is_a_node() -> None:
    assert Place(DEVICE, FABRIC).group("tp") == Place(DEVICE, FABRIC, 8).group("tp")
    assert PLACE.group("tp").size == 4
    along = Place(DEVICE, FABRIC, 2, cp=4).group("cp")
    assert (along.size, along.per_node) == (4, min(4, FABRIC.ranks_per_node // 2))


def test_total_flops() -> None:
    assert total_flops(Counter({product(2, 3, 4): 5})) == 5 * 48


POINTS = ((100.0, 1e9), (10_000.0, 4e9), (1_000_000.0, 4e9))


def test_rates_between_measured_sizes_are_on_a_line_in_logarithms() -> None:
    sizes = (1.0, 100.0, 1000.0, 10_000.0, 1e5, 1e9)
    rates = (1e9, 1e9, 2e9, 4e9, 4e9, 4e9)
    assert [measured_rate(POINTS, size) for size in sizes] == pytest.approx(rates)


def test_what_was_measured_wins_over_formulas() -> None:
    profile = Profile(
        {"float32": ((1e6, 1e9), (1e12, 1e9))}, {"float32": ((1e6, 2e9),)}, ((1e3, 1e8),)
    )
    known = replace(DEVICE, profile=profile)
    square = product(512, 512, 512, dtype="float32")
    assert kernel_seconds(square, known) == pytest.approx(square.flops / 1e9)
    skinny = product(4096, 64, 512, dtype="float32")  # the formula's, as far off as squares are
    shape = kernel_seconds(skinny, DEVICE) / kernel_seconds(square, DEVICE)
    assert kernel_seconds(skinny, known) == pytest.approx(shape * square.flops / 1e9)
    assert kernel_seconds(product(64, 64, 64), known) == kernel_seconds(product(64, 64, 64), DEVICE)
    attention = Kernel(KernelKind.ATTENTION, 10**6, 0, (8, 64, 64, 64), "float32")
    assert kernel_seconds(attention, known) == pytest.approx(5e-4)
    moved = Kernel(KernelKind.TRAFFIC, 0, 1000)
    assert kernel_seconds(moved, known) == pytest.approx(1e-5)
    assert traffic_seconds(2000, known) == pytest.approx(2e-5)


def test_measured_steps_correct_forwards_and_backwards() -> None:
    wire = Kernel(KernelKind.COLLECTIVE, 0, 1 << 20, op=ALL_REDUCE, axis="tp")
    work = Work(Counter({product(512, 512, 512): 2, wire: 1}), Counter({product(512, 512, 512): 4}))
    own = replace(PLACE, factors=Factors(forward=3.0, backward=0.5))
    wire_s = all_reduce_seconds(1 << 20, PLACE.group("tp"), FABRIC)
    before_s = work_seconds(work.forward, PLACE) - wire_s
    assert forward_seconds(work, PLACE) == work_seconds(work.forward, PLACE)
    assert forward_seconds(work, own) - wire_s == pytest.approx(3 * before_s)
    assert backward_seconds(work, own) == pytest.approx(work_seconds(work.backward, PLACE) / 2)
