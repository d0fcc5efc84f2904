"""Measures the machine that it runs on: kernels by size, launches, links between local ranks.

What it finds is a cluster file's: a device with a profile of measured rates, and a level of links.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import nnls

from merakc.equality.ranks import RankError, RankTimeoutError, run_ranks
from merakc.errors import CalibrationError
from merakc.files.printable import count_of
from merakc.kernels import gemm
from merakc.kernels.attention import attention
from merakc.kernels.collectives import gather_into
from merakc.machines.cluster import (
    COMMUNICATOR_BYTES,
    FRAGMENTATION,
    Device,
    Hardware,
    Nodes,
    Profile,
    Sharing,
)
from merakc.machines.figures import DtypeName, Points
from merakc.machines.links import Level
from merakc.runtime.links import measure_sharing, memory_bytes
from merakc.runtime.streams import wait_for

# Each call is repeated for so long, or so many times.
LEAST_S, MOST_REPEATS, LEAST_REPEATS = 0.03, 50, 3
# A size whose call takes longer is the last: larger ones are as fast.
LONGEST_S = 0.1
SIDES = tuple(1 << k for k in range(5, 14))  # of square matrices
# Sequences of attention, of so many heads and elements of a head.
SEQUENCES, HEADS, HEAD = tuple(1 << k for k in range(6, 13)), 8, 64
# Elements of a sum of two vectors: from a cache line's to what no cache holds.
LENGTHS = tuple(1 << k for k in range(8, 26, 2))
DTYPES: dict[str, tuple[DtypeName, ...]] = {
    "cpu": ("float32", "float64", "bfloat16"),
    "cuda": ("float32", "float64", "float16", "bfloat16"),
}
TINY_CALLS = 1000  # kernels of one element, to see what a launch takes
MESSAGE_BYTES = (256, 1 << 14, 1 << 18, 1 << 21, 1 << 23)
LINK_REPEATS = 7
TIMEOUT_S = 300.0
# Where there is one rank, nothing is sent: figures of the right order, which the file says.
UNMEASURED = Level("not measured", 1, 1e9, 2e-4, source="nominal: measured with --ranks 2 or more")

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Sent:
    """What a collective or message of so many bytes took."""

    kind: str
    size_bytes: int
    seconds: float


def calibrate(device: torch.device, ranks: int, tell: Tell = lambda _: None) -> Hardware:
    """The hardware of this machine with `ranks` devices; `tell` is told what is being measured.

    Raises `CalibrationError` where the ranks cannot exchange anything.
    """
    link, sharing = UNMEASURED, None
    if ranks > 1:  # first: ranks are forked, and no GPU may be open before that
        tell(f"links of {count_of(ranks, 'rank')}")
        link, sharing = measure_links(device, ranks)
    found = measure_device(device, tell)
    if device.type == "cpu":
        found = replace(found, memory_bytes=found.memory_bytes // ranks)
    own = Nodes(found, ranks, 1, sharing.together if sharing else ())
    return Hardware(found.name, (own,), (replace(link, devices=ranks),), 1.0)


def measurements(device: torch.device) -> int:
    """How many times `measure_device` tells of something, at the most."""
    return (len(SIDES) + len(SEQUENCES)) * len(DTYPES[device.type]) + len(LENGTHS) + 1


def measure_device(device: torch.device, tell: Tell = lambda _: None) -> Device:
    """A device with its measured rates; nothing else should run on it meanwhile."""
    tell("launches")
    launch_s = _launch_seconds(device)
    products: dict[DtypeName, Points] = {}
    attentions: dict[DtypeName, Points] = {}
    for dtype in DTYPES[device.type]:
        for name, found, calls in (
            ("product", products, _products(dtype, device)),
            ("attention", attentions, _attentions(dtype, device)),
        ):
            found[dtype] = _curve(calls, device, launch_s, partial(_tell, tell, f"{name} {dtype}"))
    traffic = _curve(_sums(device), device, launch_s, partial(_tell, tell, "sum"))
    peaks = {dtype: max(rate for _, rate in points) for dtype, points in products.items()}
    is_gpu, own_bytes = device.type == "cuda", memory_bytes(device)
    whole_bytes = torch.cuda.get_device_properties(device).total_memory if is_gpu else own_bytes
    return Device(
        device_name(device),
        peaks,
        traffic[-1][1],
        whole_bytes,
        torch.cuda.get_device_properties(device).multi_processor_count if is_gpu else 1,
        product_share=1.0,  # the peak is what was reached
        traffic_share=1.0,
        launch_s=launch_s,
        context_bytes=whole_bytes - own_bytes,
        communicator_bytes=COMMUNICATOR_BYTES if is_gpu else 0,
        fragmentation=FRAGMENTATION if is_gpu else 0.0,
        source=f"measured by merakc calibrate, torch {torch.__version__}",
        profile=Profile(products, attentions, traffic),
    )


def device_name(device: torch.device) -> str:
    """What its maker calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine() or "cpu"


def measure_links(device: torch.device, ranks: int) -> tuple[Level, Sharing | None]:
    """One level of links between so many local ranks, and what these share.

    Raises `CalibrationError` where they cannot exchange anything.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        found = run_ranks(ranks, _of_rank, backend, backend=backend, timeout_s=TIMEOUT_S)
    except (RankError, RankTimeoutError) as error:
        last = str(error).strip().splitlines()[-1]
        raise CalibrationError(
            f"--ranks {ranks}: {last}; see what merakc doctor says of {backend}, or give fewer"
        ) from None
    sent, sharing = found[0]
    latency_s, bytes_per_s = fit_link(sent, ranks)
    source = f"measured by merakc calibrate with {count_of(ranks, 'rank')}, {backend}"
    name = "NCCL in the node" if backend == "nccl" else "gloo over loopback"
    return Level(name, ranks, bytes_per_s, latency_s, source=source), sharing


def fit_link(sent: Sequence[Sent], ranks: int) -> tuple[float, float]:
    """Latency of a step and bytes a second, by least squares of relative errors.

    By the formulas of rings in `merakc.costs.fabric`: so many steps, and that share of the bytes.
    """
    ring = {"message": (1.0, 1.0), "all_gather": (ranks - 1.0, (ranks - 1) / ranks)}
    ring["all_reduce"] = (2 * ring["all_gather"][0], 2 * ring["all_gather"][1])
    rows = [
        (ring[one.kind][0] / one.seconds, ring[one.kind][1] * one.size_bytes / one.seconds)
        for one in sent
    ]
    latency_s, s_per_byte = nnls(np.array(rows), np.ones(len(rows)))[0]
    return float(latency_s), 1.0 / max(float(s_per_byte), 1e-15)


def _of_rank(backend: str) -> tuple[list[Sent], Sharing | None]:
    """What one rank measures, the slowest rank's seconds; collective."""
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    calls = {"message": _to_neighbour, "all_gather": _all_gather, "all_reduce": _all_reduce}
    found = []
    for kind, call in calls.items():
        for size_bytes in MESSAGE_BYTES:
            value = torch.zeros(size_bytes // 4, device=device)
            call(value)  # opens connections
            times = [_timed(call, value) for _ in range(LINK_REPEATS)]
            slowest = torch.tensor(statistics.median(times), dtype=torch.float64, device=device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            # There and back are two messages.
            seconds = float(slowest) / (2 if kind == "message" else 1)
            found.append(Sent(kind, size_bytes, seconds))
    return found, measure_sharing() if backend == "gloo" else None


def _timed(call: Callable[[torch.Tensor], None], value: torch.Tensor) -> float:
    dist.barrier()
    start_s = time.perf_counter()
    call(value)
    if value.is_cuda:
        torch.cuda.synchronize(value.device)
    return time.perf_counter() - start_s


def _to_neighbour(value: torch.Tensor) -> None:
    """To the next rank and back, in pairs; a rank that is left over waits."""
    rank, peer = dist.get_rank(), dist.get_rank() ^ 1
    if peer >= dist.get_world_size():
        return
    for turn in (0, 1):
        if rank % 2 == turn:
            dist.send(value, peer)
        else:
            dist.recv(value, peer)


def _all_gather(value: torch.Tensor) -> None:
    ranks = dist.get_world_size()
    whole = value[: value.numel() // ranks * ranks]
    world = dist.group.WORLD
    assert world is not None, "ranks are started before they are measured"
    gather_into(whole, whole.chunk(ranks)[dist.get_rank()], world).wait()


def _all_reduce(value: torch.Tensor) -> None:
    dist.all_reduce(value)


_Call = tuple[int, float, Callable[[], object]]  # what it is named by, its size, and the call


def _tell(tell: Tell, what: str, size: int) -> None:
    tell(f"{what} {size}")


def _products(dtype: DtypeName, device: torch.device) -> Iterator[_Call]:
    onednn = device.type == "cpu" and dtype == "float32" and gemm.is_faster()
    for side in SIDES:
        left, right = (torch.randn(side, side, device=device).to(_torch(dtype)) for _ in range(2))
        flops = 2.0 * side**3
        call = gemm.mm if onednn and flops >= gemm.LEAST_FLOPS else torch.mm
        yield side, flops, partial(call, left, right)


def _attentions(dtype: DtypeName, device: torch.device) -> Iterator[_Call]:
    for length in SEQUENCES:
        shape = (1, HEADS, length, HEAD)
        q, k, v = (torch.randn(shape, device=device).to(_torch(dtype)) for _ in range(3))
        flops = 4.0 * HEADS * length * length * HEAD
        yield length, flops, partial(attention, q, k, v)


def _sums(device: torch.device) -> Iterator[_Call]:
    for length in LENGTHS:
        left, right = (torch.randn(length, device=device) for _ in range(2))
        yield length, 3.0 * 4 * length, partial(torch.add, left, right)


def _curve(
    calls: Iterator[_Call], device: torch.device, launch_s: float, tell: Callable[[int], None]
) -> Points:
    """(size, rate) of each call, launches taken out, up to the first that takes long."""
    found = []
    for name, size, call in calls:
        tell(name)
        seconds = call_seconds(call, device)
        # What is launched behind one another takes no less on the device than a tenth of a launch.
        found.append((size, size / max(seconds - launch_s, 0.1 * launch_s, 1e-9)))
        if seconds > LONGEST_S:
            break
    return tuple(found)


def call_seconds(call: Callable[[], object], device: torch.device) -> float:
    """The median seconds of a call that is made again and again."""
    call()
    times: list[float] = []
    while len(times) < LEAST_REPEATS or (sum(times) < LEAST_S and len(times) < MOST_REPEATS):
        wait_for(device)
        start_s = time.perf_counter()
        call()
        wait_for(device)
        times.append(time.perf_counter() - start_s)
    return statistics.median(times)


def _launch_seconds(device: torch.device) -> float:
    """What the host takes to start a kernel of one element, of many in a row."""
    one = torch.zeros(1, device=device)
    rounds = []
    for _ in range(LEAST_REPEATS + 1):
        start_s = time.perf_counter()
        for _ in range(TINY_CALLS):
            torch.add(one, one)
        rounds.append((time.perf_counter() - start_s) / TINY_CALLS)
        wait_for(device)
    return min(rounds)


def _torch(dtype: DtypeName) -> torch.dtype:
    found: torch.dtype = getattr(torch, dtype)
    return found


def most_ranks(device: torch.device) -> int:
    """The ranks that this machine has devices for: its GPUs, or its cores."""
    return torch.cuda.device_count() if device.type == "cuda" else len(os.sched_getaffinity(0))
