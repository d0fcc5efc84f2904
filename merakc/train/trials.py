"""Measures what computes of the stages take in a step, what a step does around them, and which
cores ranks share.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from merakc.ir.program import ActionKind
from merakc.machines.cluster import Sharing
from merakc.runtime.groups import together
from merakc.runtime.health.job import all_ranks
from merakc.runtime.part import plain
from merakc.runtime.streams import wait_for
from merakc.train.batch_reads import micro_batches_of
from merakc.train.compiled_step import CompiledStep
from merakc.train.outputs import HandOut
from merakc.train.steps import Steps

# Trials, as many as this time has room for.
TRIALS, TIME_S = 15, 5.0
Seconds = Mapping[int, Mapping[ActionKind, float]]
# Positional and named arguments.
Batch = tuple[Sequence[Any], Mapping[str, Any]]


def measure_computes(steps: Steps, step: CompiledStep) -> Sequence[Seconds]:
    """Seconds of the computes of a micro-batch of this rank by stage, in some steps; collective.

    Ranks that share cores, and messages that cost a CPU's time, slow computes down as they do in
    training. Nothing where the rank's stages do not run on the zeros that stand in for a batch; the
    others are then measured without messages.
    """
    start_s = time.perf_counter()
    works = bool(steps.trial(step, alone=True))  # and warms up
    trial_s = time.perf_counter() - start_s
    tried = together(lambda: (works, trial_s))
    if not works:
        return []
    count = min(TRIALS, max(1, round(TIME_S / max(s for _, s in tried))))
    alone = not all(each for each, _ in tried)
    return [steps.trial(step, alone=alone) for _ in range(count)]


def measure_around(steps: Steps, step: CompiledStep, example: Batch) -> float:
    """Seconds of what a step does before and after its Program; of the slowest rank; collective."""
    seconds, trained = [], [plain(t) for t in steps.state.values() if t.requires_grad]
    gradients = {str(k): torch.zeros_like(t) for k, t in enumerate(trained)}
    for _ in range(TRIALS):
        given = [t.detach().requires_grad_() for t in trained]
        dist.barrier(all_ranks()) if dist.is_initialized() else None
        wait_for(steps.device)
        start_s = time.perf_counter()
        steps.key(*example, steps.layout(*example), step.form)
        micro_batches_of(*example, step.lowered.plan, step.recording.dims)
        loss = steps.around(step, gradients)
        if given:
            HandOut.apply(loss, [*gradients.values()], *given).backward()  # type: ignore[no-untyped-call]
        wait_for(steps.device)
        seconds.append(time.perf_counter() - start_s)
    return max(together(lambda: median(seconds)))


def shared_cores(device: torch.device) -> Sharing | None:
    """The cores that the ranks of the fullest machine share; collective.

    None where nothing is shared: on GPUs, and with one rank on each machine.
    """
    own = socket.gethostname(), len(os.sched_getaffinity(0))
    ranks = together(lambda: own)
    devices = max(Counter(machine for machine, _ in ranks).values())
    if device.type != "cpu" or devices == 1:
        return None
    cores = min(devices, *(count for _, count in ranks))
    return Sharing((1.0,) * cores, devices)
