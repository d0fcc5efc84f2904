"""Measuring this machine, with few and small calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from merakc.cli import calibration
from merakc.cli.calibration import (
    Sent,
    calibrate,
    call_seconds,
    fit_link,
    measure_links,
    measurements,
    most_ranks,
)
from merakc.errors import CalibrationError
from merakc.kernels import gemm
from merakc.machines.cluster_files import cluster_text, parse_cluster
from merakc.machines.figures import DtypeName

CPU = torch.device("cpu")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "SIDES", (32, 64, 128))
    monkeypatch.setattr(calibration, "SEQUENCES", (64, 128))
    monkeypatch.setattr(calibration, "LENGTHS", (256, 1 << 16))
    monkeypatch.setattr(calibration, "DTYPES", {"cpu": ("float32",)})
    monkeypatch.setattr(calibration, "MESSAGE_BYTES", (256, 1 << 16))
    monkeypatch.setattr(calibration, "LEAST_S", 0.001)


@pytest.mark.usefixtures("few")
def test_what_is_measured_is_a_cluster_file() -> None:
    told: list[str] = []
    found = calibrate(CPU, 2, told.append)
    assert told[:3] == ["links of 2 ranks", "launches", "product float32 32"]
    assert len(told) == measurements(CPU) + 1
    assert parse_cluster(cluster_text(found)) == found
    device, link = found.nodes[0].device, found.links[0]
    assert found.nodes[0].devices == link.devices == 2
    assert device.profile is not None
    assert [size for size, _ in device.profile.products["float32"]] == [
        2.0 * n**3 for n in (32, 64, 128)
    ]
    assert device.peak_flops_per_s["float32"] == max(
        rate for _, rate in device.profile.products["float32"]
    )
    assert len(device.profile.attention["float32"]) == len(device.profile.traffic) == 2
    assert 1e-7 < device.launch_s < 1e-2
    assert 1e8 < device.peak_flops_per_s["float32"] < 1e14
    assert link.bytes_per_s > 1e5
    assert found.sharing is not None
    assert found.sharing.cores == min(2, most_ranks(CPU))


@pytest.mark.usefixtures("few")
def test_one_rank_says_that_links_are_not_measured() -> None:
    found = calibrate(CPU, 1)
    assert "nominal" in found.links[0].source
    assert found.sharing is None


def test_a_link_is_found_from_what_was_sent() -> None:
    latency_s, bytes_per_s, ranks = 1e-4, 2e9, 4
    sent = []
    for size in (256, 1 << 20, 1 << 23):
        sent.append(Sent("message", size, latency_s + size / bytes_per_s))
        sent.append(Sent("all_gather", size, 3 * latency_s + 0.75 * size / bytes_per_s))
        sent.append(Sent("all_reduce", size, 6 * latency_s + 1.5 * size / bytes_per_s))
    assert fit_link(sent, ranks) == pytest.approx((latency_s, bytes_per_s), rel=1e-6)


def test_ranks_that_cannot_start_are_an_error() -> None:
    with pytest.raises(CalibrationError, match=r"--ranks 2: .*doctor says of nccl"):
        measure_links(torch.device("cuda"), 2)


@pytest.fixture
def sleep(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """What lets time pass, which nothing else does."""
    now_s = 0.0

    def passes(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    monkeypatch.setattr(calibration.time, "perf_counter", lambda: now_s)
    return passes


def test_the_seconds_of_a_call(sleep: Callable[[float], None]) -> None:
    assert call_seconds(lambda: sleep(0.01), CPU) == pytest.approx(0.01)


def test_sizes_end_where_calls_take_long(
    monkeypatch: pytest.MonkeyPatch, sleep: Callable[[float], None]
) -> None:
    monkeypatch.setattr(calibration, "LONGEST_S", 0.005)
    calls = ((n, float(n), lambda n=n: sleep(0.004 * n)) for n in (1, 2, 3, 4))
    found = calibration._curve(calls, CPU, 0.0, lambda _: None)
    assert [size for size, _ in found] == [1.0, 2.0]
    assert found[0][1] == pytest.approx(250)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(("dtype", "gain"), [("float32", 2.0), ("float32", 1.0), ("float64", 2.0)])
def test_products_are_those_of_ranks(
    dtype: DtypeName, gain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemm, "gain", lambda: gain)
    monkeypatch.setattr(calibration, "SIDES", (32, 256))
    small, large = (call.func for *_, call in calibration._products(dtype, CPU))
    assert small is torch.mm
    assert large is (gemm.mm if dtype == "float32" and gain > gemm.LEAST_GAIN else torch.mm)
