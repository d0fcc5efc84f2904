"""Measures the links between the ranks, and asks for the device's memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

REPEATS = 5
SMALL_BYTES, LARGE_BYTES = 64, 1 << 22
# Typical of gloo on one machine; used where there is no other rank to measure with.
LINK_LATENCY_S, LINK_BYTES_PER_S = 2e-4, 1e9


def measure_link(device: torch.device) -> tuple[float, float]:
    """Latency (seconds) and bandwidth (bytes per second and direction), by all-reduces over all
    ranks, which move their bytes twice.

    The slowest rank's figures, so that all ranks have the same.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return LINK_LATENCY_S, LINK_BYTES_PER_S
    small = torch.zeros(SMALL_BYTES // 4, device=device)
    large = torch.zeros(LARGE_BYTES // 4, device=device)
    latency_s = _median_seconds(lambda: dist.all_reduce(small), device)
    large_s = _median_seconds(lambda: dist.all_reduce(large), device)
    slowest = torch.tensor([latency_s, large_s], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    latency_s, large_s = slowest.tolist()
    return latency_s, 2 * LARGE_BYTES / max(large_s - latency_s, 1e-6)


def memory_bytes(device: torch.device) -> int:
    """The device's memory; of a CPU, the machine's, shared by the ranks on it."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(whole / max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1))


def _median_seconds(call: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[REPEATS // 2]
