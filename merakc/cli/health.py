"""What this machine can do, checked one thing at a time, with a remedy for each that it cannot."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from merakc.equality.ranks import RankError, RankTimeoutError, run_ranks
from merakc.files.printable import count_of
from merakc.kernels import gemm
from merakc.report.units import format_bytes

Status = Literal["ok", "warn", "fail"]
# Ranks of one machine exchange by it, and data loaders more: NCCL takes some 30 MiB a pair.
SHARED_BYTES = 1 << 30
OPEN_FILES = 4096  # every rank holds a socket or two for each other
ALL_REDUCE_TIMEOUT_S = 60.0
SHARED_MEMORY = Path("/dev/shm")
# What a job is started with, and what is left behind where a shell once exported it.
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# Settings that make steps slow, and why one may have made them.
SLOWING = {
    "CUDA_LAUNCH_BLOCKING": "makes every kernel wait, for debugging",
    "NCCL_P2P_DISABLE": "keeps GPUs of one node from reading each other's memory",
    "NCCL_SHM_DISABLE": "keeps ranks of one node from exchanging by shared memory",
    "NCCL_IB_DISABLE": "keeps nodes from using InfiniBand",
    "TORCH_DISTRIBUTED_DEBUG": "checks every collective, for debugging",
}
INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at: what was found and, unless all is well, what to do."""

    name: str
    status: Status
    found: str
    remedy: str = ""


def all_checks(environment: Mapping[str, str] = os.environ) -> Iterator[Check]:
    """Everything, the quick ones first."""
    yield from versions()
    yield from backends()
    yield all_reduce("gloo", 2)
    gpus = torch.cuda.device_count()
    if gpus and dist.is_nccl_available():
        yield all_reduce("nccl", min(gpus, 2))
    yield from devices()
    yield host_memory()
    yield shared_memory()
    yield open_files()
    yield host_name()
    yield from settings(environment)


def versions() -> Iterator[Check]:
    """Python and the packages that merakc's own metadata asks for, those of extras if they are."""
    try:
        own = metadata.metadata("merakc")
    except metadata.PackageNotFoundError:
        found = "is on the path and not installed: nothing says which versions it needs"
        yield Check("merakc", "warn", found, "pip install it, or make install in a clone")
        return
    wanted = SpecifierSet(own["Requires-Python"] or "")
    found = platform.python_version()
    if found in wanted:
        yield Check("Python", "ok", found)
    else:
        yield Check("Python", "fail", f"{found}, and merakc needs {wanted}", "install a newer one")
    for text in metadata.requires("merakc") or ():
        requirement = Requirement(text)
        extra = _extra(requirement)
        if extra != "dev":
            yield version(requirement, extra)


def version(requirement: Requirement, extra: str = "") -> Check:
    """One package: missing or out of its range it fails, but for those of extras, which warn."""
    name, wanted = requirement.name, requirement.specifier
    package = f"merakc[{extra}]" if extra else f"'{name}{wanted}'"
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        status: Status = "warn" if extra else "fail"
        return Check(name, status, "is not installed", f"pip install {package}")
    if wanted.contains(found, prereleases=True):
        return Check(name, "ok", found)
    return Check(name, "fail", f"{found}, and merakc needs {wanted}", f"pip install -U {package}")


def _extra(requirement: Requirement) -> str:
    """The extra that a requirement is of; empty where merakc always needs it."""
    marker = requirement.marker
    if marker is None or marker.evaluate({"extra": ""}):
        return ""
    extras = metadata.metadata("merakc").get_all("Provides-Extra") or []
    return next((extra for extra in extras if marker.evaluate({"extra": extra})), "dev")


def backends() -> Iterator[Check]:
    """What ranks can communicate with."""
    if not dist.is_available():
        remedy = "install a torch that was built with distributed"
        yield Check("torch.distributed", "fail", "is not there", remedy)
        return
    if dist.is_gloo_available():
        yield Check("gloo", "ok", "is there, for CPUs")
    else:
        yield Check("gloo", "fail", "is not there", "install a torch that was built with gloo")
    if torch.version.cuda is None:
        status: Status = "warn" if shutil.which("nvidia-smi") else "ok"
        remedy = "install a torch that was built with CUDA" if status == "warn" else ""
        yield Check("CUDA", status, f"torch {torch.__version__} was built without it", remedy)
    elif not torch.cuda.device_count():  # it opens no device: ranks can still be forked
        status = "warn" if shutil.which("nvidia-smi") else "ok"
        remedy = "look at nvidia-smi; a driver older than CUDA's is the usual cause"
        found = f"{torch.version.cuda}, and no GPU that it can use"
        yield Check("CUDA", status, found, remedy if status == "warn" else "")
    else:
        yield Check("CUDA", "ok", str(torch.version.cuda))
        nccl = _nccl_version() if dist.is_nccl_available() else ""
        remedy = "install a torch that was built with NCCL"
        yield Check("NCCL", "ok", nccl) if nccl else Check("NCCL", "fail", "is not there", remedy)


def _nccl_version() -> str:
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def all_reduce(backend: str, ranks: int, timeout_s: float = ALL_REDUCE_TIMEOUT_S) -> Check:
    """Whether that many local ranks add up a tensor."""
    name = f"all-reduce of {count_of(ranks, 'rank')} by {backend}"
    start_s = time.perf_counter()
    try:
        sums = run_ranks(ranks, _sum_of_ones, backend, backend=backend, timeout_s=timeout_s)
    except (RankError, RankTimeoutError) as error:
        last = str(error).strip().splitlines()[-1]
        remedy = "see the checks of the host's name and of *_SOCKET_IFNAME below"
        return Check(name, "fail", last, remedy)
    if sums != [float(ranks)] * ranks:
        return Check(name, "fail", f"gave {sums}", "test the links or memory of this machine")
    return Check(name, "ok", f"{time.perf_counter() - start_s:.1f} s with the start of the ranks")


def _sum_of_ones(backend: str) -> float:
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", dist.get_rank())
        torch.cuda.set_device(device)
    ones = torch.ones(1024, device=device)
    dist.all_reduce(ones)
    return float(ones.mean())


def devices() -> Iterator[Check]:
    """The processors, what multiplies on them, and what each GPU has free."""
    cores = len(os.sched_getaffinity(0))
    yield Check("CPU", "ok", f"{count_of(cores, 'core')} for this process, {platform.machine()}")
    by = f"oneDNN's, {gemm.gain():.1f} times as fast as torch's" if gemm.is_faster() else "torch's"
    yield Check("products of float32", "ok", by)
    for k in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(k)
        name = torch.cuda.get_device_name(k)
        found = f"{name}, {format_bytes(free)} free of {format_bytes(total)}"
        if free < total / 2:
            remedy = "end what else runs on it: nvidia-smi names it"
            yield Check(f"GPU {k}", "warn", found, remedy)
        else:
            yield Check(f"GPU {k}", "ok", found)


def host_memory() -> Check:
    """What this machine has, for weights on the CPU and for data."""
    page = os.sysconf("SC_PAGE_SIZE")
    total, free = (page * os.sysconf(n) for n in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
    return Check("memory", "ok", f"{format_bytes(total)}, {format_bytes(free)} unused")


def shared_memory(place: Path = SHARED_MEMORY, least_bytes: int = SHARED_BYTES) -> Check:
    """What ranks of one node and data loaders exchange by."""
    if not place.is_dir():
        return Check("shared memory", "fail", f"there is no {place}", f"mount a tmpfs on {place}")
    free = shutil.disk_usage(place).free
    found = f"{format_bytes(free)} free in {place}"
    if free < least_bytes:
        remedy = "make it larger; a container is given more with --shm-size"
        return Check("shared memory", "warn", found, remedy)
    return Check("shared memory", "ok", found)


def open_files(least: int = OPEN_FILES) -> Check:
    """How many files and sockets a rank may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < least:
        remedy = f"ulimit -n {least}, before ranks are started"
        return Check("open files", "warn", f"at most {soft}", remedy)
    return Check("open files", "ok", f"at most {soft:,}" if soft >= 0 else "any number")


def host_name() -> Check:
    """Whether other ranks find this machine by its name."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        remedy = f"add it to /etc/hosts: 127.0.0.1 {name}; or export GLOO_SOCKET_IFNAME=lo"
        return Check("host name", "warn", f"{name} does not resolve", remedy)
    return Check("host name", "ok", f"{name} is {address}")


def settings(environment: Mapping[str, str]) -> Iterator[Check]:
    """Variables of the environment that ranks would start with."""
    if "OMP_NUM_THREADS" not in environment:
        remedy = "export OMP_NUM_THREADS to the cores a rank may use (torchrun takes 1)"
        found = "is not set: each rank that you start computes on all cores"
        yield Check("OMP_NUM_THREADS", "warn", found, remedy)
    else:
        yield Check("OMP_NUM_THREADS", "ok", environment["OMP_NUM_THREADS"])
    left = [name for name in LAUNCHER if name in environment]
    if left:
        found = f"{', '.join(left)} {'is' if len(left) == 1 else 'are'} set in this shell"
        remedy = f"unset {' '.join(left)}: torchrun sets them, and merakc would wait for ranks"
        yield Check("launcher", "warn", found, remedy)
    for name, effect in SLOWING.items():
        if environment.get(name, "0").upper() not in ("0", "OFF", ""):
            yield Check(name, "warn", f"{environment[name]}: {effect}", f"unset {name}")
    there = {name for _, name in socket.if_nameindex()}
    for name in INTERFACES:
        # NCCL takes prefixes, `=` for a whole name, and `^` for all but those.
        asked = environment.get(name, "").lstrip("=")
        missing = [
            part
            for part in asked.split(",")
            if part and not asked.startswith("^") and not any(i.startswith(part) for i in there)
        ]
        if missing:
            remedy = f"export {name} with one of {', '.join(sorted(there))}, or unset it"
            yield Check(name, "fail", f"there is no interface {', '.join(missing)}", remedy)
        elif asked:
            yield Check(name, "ok", asked)
    if environment.get("CUDA_VISIBLE_DEVICES") == "" and shutil.which("nvidia-smi"):
        remedy = "unset CUDA_VISIBLE_DEVICES"
        yield Check("CUDA_VISIBLE_DEVICES", "warn", "is empty: no GPU is seen", remedy)
