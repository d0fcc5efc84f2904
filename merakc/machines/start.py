"""The device and the process group of a rank, where nobody has chosen them."""

from __future__ import annotations

import atexit
import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from merakc.errors import ConfigError

# What launchers call a process's place among those of its machine: torchrun, Slurm, Open MPI, and
# MPICH with what is made of it.
LOCAL_RANKS = (
    "LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID",
)  # fmt: skip


def device_of(device: torch.device | str | None) -> torch.device:
    """The device that was asked for; if None, this rank's GPU where there is one, else the CPU.

    A GPU without a number is the only one that this process sees, the one that it has made current,
    or that of its local rank. It is made current. Raises `ConfigError` where there is none.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found = torch.device(device)
    if found.type != "cuda":
        return found
    count = torch.cuda.device_count()
    index = _gpu_of_this_rank(count) if found.index is None else found.index
    if index >= count:
        told = ", ".join(f"{name}={os.environ[name]}" for name in LOCAL_RANKS if name in os.environ)
        raise ConfigError(
            f"device {device!s} is GPU {index} here ({told or 'no local rank is set'}), and this "
            f"process sees {count}; start as many ranks on a machine as it has GPUs, or give "
            "device="
        )
    found = torch.device("cuda", index)
    torch.cuda.set_device(found)
    return found


def _gpu_of_this_rank(count: int) -> int:
    if count == 1:  # launchers may show each rank its own alone
        return 0
    is_open = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if is_open and (current := torch.cuda.current_device()):
        return current
    told = (os.environ[name] for name in LOCAL_RANKS if name in os.environ)
    return int(next(told, "0"))


def start_distributed(device: torch.device, timeout_s: float = 600.0) -> int:
    """The number of ranks, whose process group is made where several were started without one, with
    this as its timeout.

    Raises `ConfigError` where there is one that cannot do what ranks on `device` need, and where
    two ranks have one GPU.
    """
    if dist.is_initialized():
        backends = dist.get_backend_config()
        for kind in {"cpu", device.type}:
            if f"{kind}:" not in backends:
                raise ConfigError(
                    f"the process group has no backend for {kind} tensors (it has {backends}); "
                    'give init_process_group "cpu:gloo,cuda:nccl", or leave it to auto_parallel'
                )
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        atexit.register(_leave)
    if not dist.is_initialized():
        return 1
    if "cuda:nccl" in dist.get_backend_config():  # which refuses two ranks on one
        _check_own_gpus(device)
    return dist.get_world_size()


def _leave() -> None:
    """Ends the process group, if nobody has."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _check_own_gpus(device: torch.device) -> None:
    """Raises `ConfigError` on all ranks where two have one GPU; they would wait for each other."""
    own = socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)
    everyone: list[tuple[str, str]] = [own] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    first: dict[tuple[str, str], int] = {}
    for rank, (host, gpu) in enumerate(everyone):
        other = first.setdefault((host, gpu), rank)
        if other != rank:
            raise ConfigError(
                f"ranks {other} and {rank} have the same GPU ({gpu} of {host}): give each its own, "
                f"by device=, torch.cuda.set_device or one of {', '.join(LOCAL_RANKS)}"
            )
