"""Measures the links between the ranks, and asks for the device's memory."""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from merakc.machines.cluster import Sharing
from merakc.runtime.health.job import all_ranks

REPEATS = 5
SMALL_BYTES, LARGE_BYTES = 64, 1 << 22
# Typical of gloo on one machine; used where there is no other rank to measure with.
LINK_LATENCY_S, LINK_BYTES_PER_S = 2e-4, 1e9
# What is computed to see how ranks slow each other down: products of matrices that a core's caches
# hold, and sums of vectors that they do not.
SIDE, LENGTH, ROUNDS = 256, 1 << 20, 8


def measure_link(
    device: torch.device, group: dist.ProcessGroup | None = None
) -> tuple[float, float]:
    """Latency (seconds) of a step of a collective and bandwidth (bytes per second and direction),
    by all-reduces over all ranks, or over the group of each.

    An all-reduce of n ranks in a ring takes 2 (n - 1) steps, in which a rank sends 2 (n - 1) / n of
    its bytes (`merakc.costs.fabric`). The slowest rank's figures, so that all ranks have the same.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return LINK_LATENCY_S, LINK_BYTES_PER_S
    group = group or all_ranks()
    small = torch.zeros(SMALL_BYTES // 4, dtype=torch.float32, device=device)
    large = torch.zeros(LARGE_BYTES // 4, dtype=torch.float32, device=device)
    small_s = _median_seconds(lambda: dist.all_reduce(small, group=group), device)
    large_s = _median_seconds(lambda: dist.all_reduce(large, group=group), device)
    small_s, large_s = _slowest([small_s, large_s], device)
    ranks = dist.get_world_size(group)
    sent = 2 * (ranks - 1) / ranks * LARGE_BYTES
    return small_s / (2 * (ranks - 1)), sent / max(large_s - small_s, 1e-6)


def measure_messages(device: torch.device, group: dist.ProcessGroup) -> tuple[float, float]:
    """Latency and bandwidth of a message from a rank of the group to its neighbour, while others of
    the group wait; all groups at once. The slowest group's figures.
    """
    ranks = dist.get_process_group_ranks(group)
    place, times = ranks.index(dist.get_rank()), []
    for size_bytes in (SMALL_BYTES, LARGE_BYTES):
        value = torch.zeros(size_bytes // 4, dtype=torch.float32, device=device)

        def there_and_back(value: torch.Tensor = value) -> None:
            for source, target in ((0, 1), (1, 0)):
                if place == source:
                    dist.send(value, ranks[target], group)
                elif place == target:
                    dist.recv(value, ranks[source], group)

        times.append(_median_seconds(there_and_back, device) / 2)
    small_s, large_s = _slowest(times, device)
    return small_s, LARGE_BYTES / max(large_s - small_s, 1e-6)


def measure_sharing() -> Sharing | None:
    """What the ranks of this machine share; collective.

    One rank computes alone, then as many as there are cores do; between them the speed is taken for
    linear. None where nothing is shared: with one rank on the machine.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, socket.gethostname(), all_ranks())
    here = tuple(r for r, name in enumerate(everyone) if name == everyone[dist.get_rank()])
    cores = min(len(os.sched_getaffinity(0)), len(here))
    alone_s, together_s = (_work_seconds(here.index(dist.get_rank()) < n) for n in (1, cores))
    share = min(1.0, alone_s / together_s)
    if len(here) == 1:
        return None
    steps = range(cores)
    shares = (1.0 + (share - 1.0) * k / max(cores - 1, 1) for k in steps)
    return Sharing(tuple(shares), len(here))


def _work_seconds(works: bool) -> float:
    """Seconds of the same work on the ranks that do it, at once: the median rank's."""
    left, right = (torch.ones(SIDE, SIDE, dtype=torch.float32) for _ in range(2))
    vector = torch.ones(LENGTH, dtype=torch.float32)

    def work() -> None:
        for _ in range(ROUNDS):
            torch.mm(left, right)
        torch.add(vector, vector)

    work()
    dist.barrier(all_ranks())
    own = _median_seconds(work, torch.device("cpu")) if works else None
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own, all_ranks())
    return float(statistics.median(seconds for seconds in everyone if seconds is not None))


def _slowest(times: Sequence[float], device: torch.device) -> list[float]:
    slowest = torch.tensor(times, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, all_ranks())
    found: list[float] = slowest.tolist()
    return found


def memory_bytes(device: torch.device) -> int:
    """The device's memory, less what contexts, this process's too, and other processes hold of it;
    of a CPU, the machine's, shared by the ranks on it.
    """
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return int(free_bytes + torch.cuda.memory_reserved(device))
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
