"""How the ranks of a job begin, and how they end."""

from __future__ import annotations

import atexit
import gc
from dataclasses import replace

import torch

from merakc.kernels.collectives import unbind_axes
from merakc.machines.cluster import (
    COMMUNICATOR_BYTES,
    FRAGMENTATION,
    NOMINAL_CPU,
    NOMINAL_GPU,
    Cluster,
)
from merakc.machines.excepthook import show_errors_short
from merakc.machines.start import start_distributed
from merakc.runtime.fused import Fuser, check_compiler
from merakc.runtime.health.job import start_job
from merakc.runtime.links import memory_bytes
from merakc.train.checkpoints.full_state import gather_on_request
from merakc.train.expectations.trials import shared_cores
from merakc.train.steps import living


def started(device: torch.device, compile: bool, timeout_s: float) -> tuple[int, Fuser | None]:
    """The number of ranks, which are connected, and what fuses graphs where that is asked for."""
    show_errors_short()
    gather_on_request()
    if compile:
        check_compiler(device)
    world = start_distributed(device, timeout_s)
    atexit.unregister(_release_groups)  # once, and before the process group goes
    atexit.register(_release_groups)
    start_job(timeout_s)  # and says goodbye before that
    return world, Fuser(device) if compile else None


def _release_groups() -> None:
    """Lets go of every process group, which ends its threads.

    A thread of gloo's that still frees a tensor while Python shuts down aborts the process.
    """
    for steps in living:
        steps.close()
    unbind_axes()
    gc.collect()


def machines_for(given: Cluster | None, device: torch.device) -> Cluster:
    """What plans are made with: the machines that are given, with products of 32 bits as torch is
    told to make them, or nominal ones: these ranks' memory, and the cores that are fewer than they.
    Collective.
    """
    if given is not None:
        return given if torch.get_float32_matmul_precision() == "highest" else given.rounding()
    if device.type == "cuda":
        left = memory_bytes(device) - 3 * COMMUNICATOR_BYTES  # of dp, tp and pp
        return replace(NOMINAL_GPU, memory_bytes=int(left * (1.0 - FRAGMENTATION)))
    sharing = shared_cores(device)
    few = sharing is not None and sharing.cores < sharing.devices
    own_bytes = memory_bytes(device)
    return replace(NOMINAL_CPU, memory_bytes=own_bytes, sharing=sharing if few else None)
