"""The device and the process group of a rank, where nobody has chosen them."""

from __future__ import annotations

import atexit
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from merakc.errors import ConfigError


def device_of(device: torch.device | str | None) -> torch.device:
    """The device that was asked for; if None, this rank's GPU where there is one, else the CPU."""
    if device is not None:
        return torch.device(device)
    if torch.cuda.is_available():
        found = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(found)
        return found
    return torch.device("cpu")


def start_distributed(device: torch.device, timeout_s: float = 600.0) -> int:
    """The number of ranks, whose process group is made where several were started without one, with
    this as its timeout.

    Raises `ConfigError` where there is one that cannot do what ranks on `device` need.
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
        atexit.register(dist.destroy_process_group)
    return dist.get_world_size() if dist.is_initialized() else 1
