"""Measures what computes of the stages take in a step, what a step does around them, and which
cores ranks share.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree

from merakc.errors import MerakError
from merakc.ir.graph import InputKind
from merakc.ir.program import ActionKind
from merakc.machines.cluster import Sharing
from merakc.runtime.executor import StepResult
from merakc.runtime.groups import together
from merakc.runtime.health.job import all_ranks
from merakc.runtime.part import plain
from merakc.runtime.state import digest
from merakc.runtime.streams import wait_for
from merakc.runtime.trial import Brought, trial_seconds, zeros
from merakc.train.batch_reads import micro_batches_of
from merakc.train.compiled_step import CompiledStep
from merakc.train.outputs import HandOut
from merakc.train.steps import Steps

# Trials: as many as the first time has room for, or the fewest where the second has.
FEWEST, TRIALS = 3, 15
TIME_S, MOST_S = 1.0, 5.0
# What graphs may raise on the zeros that stand in for a batch: of a real one they would not.
ON_ZEROS = (ArithmeticError, LookupError, RuntimeError, ValueError, MerakError)
Seconds = Mapping[int, Mapping[ActionKind, float]]
# Positional and named arguments.
Batch = tuple[Sequence[Any], Mapping[str, Any]]


def values_of(steps: Steps, step: CompiledStep, example: Batch) -> Brought | None:
    """What a step reads of a batch; None of one that some rank has no values of, ranks of one
    replica have others of, or the forward does not take, since only shapes of examples count;
    collective.
    """
    tensors = [x for x in pytree.tree_leaves(example) if isinstance(x, torch.Tensor)]
    batches, own = list[dict[str, torch.Tensor]](), ""
    if not any(x.is_meta for x in tensors):
        with suppress(*ON_ZEROS):
            batches = steps.batches(step, *example)
            if step.knowledge is not None:
                step.knowledge.parts(batches)
            own = digest(tensors)
    replicas = set(together(lambda: (steps.groups.coordinates[0], own)))
    if len(replicas) > steps.planned.plan.dp or not all(values for _, values in replicas):
        return None
    brought = None
    with suppress(*ON_ZEROS):
        brought = steps.brought(step, batches)
    return brought if all(together(lambda: brought is not None)) else None


def trial(
    steps: Steps, step: CompiledStep, brought: Brought | None = None, *, alone: bool
) -> Seconds:
    """Measured seconds of this rank's computes of a micro-batch, by stage, on what is `brought` or
    on zeros; collective, where it is not `alone` (`trial_seconds`).

    None at all where, alone, the graph does not run on the zeros that stand in for a batch: an
    index made from them may be out of range, a module may do what it did on no random arguments.
    All ranks of a tp group fail alike.
    """
    steps.bind()
    if steps.sharded is not None:
        steps.sharded.begin(step.trained, step.executor.gradients)
    with suppress(*(ON_ZEROS if alone else ())):
        return trial_seconds(step.executor, brought, alone=alone)
    return {}


def measure_computes(
    steps: Steps, step: CompiledStep, brought: Brought | None = None
) -> Sequence[Seconds]:
    """`trial`s; collective. Ranks that share cores, and messages that cost a CPU's time, slow
    computes down as they do in training. Nothing where the rank's stages do not run on zeros; the
    others are then measured without messages.
    """
    works, tried = _tried(steps, step, brought)
    if brought is not None and not all(each for each, _ in tried):
        brought = None
        works, tried = _tried(steps, step, brought)
    if not works:
        return []
    alone = not all(each for each, _ in tried)
    count = count_of(max(s for _, s in tried))
    return [trial(steps, step, brought, alone=alone) for _ in range(count)]


def count_of(trial_s: float) -> int:
    """How many trials of so many seconds there are."""
    return min(TRIALS, max(FEWEST, round(TIME_S / trial_s)), max(1, round(MOST_S / trial_s)))


def _tried(
    steps: Steps, step: CompiledStep, brought: Brought | None
) -> tuple[bool, list[tuple[bool, float]]]:
    """Whether this rank's stages run, alone, and that and the seconds of all ranks; warms up."""
    start_s = time.perf_counter()
    works = bool(trial(steps, step, brought, alone=True))
    trial_s = time.perf_counter() - start_s
    return works, together(lambda: (works, trial_s))


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
        _bring_zeros(steps, step)
        loss, _ = steps.share_loss(step, StepResult(None, gradients, [], (), ()))
        if given:
            HandOut.apply(loss, [*gradients.values()], None, *given).backward()  # type: ignore[no-untyped-call]
        wait_for(steps.device)
        seconds.append(time.perf_counter() - start_s)
    return max(together(lambda: median(seconds)))


def _bring_zeros(steps: Steps, step: CompiledStep) -> None:
    known = step.lowered.loss.known
    wanted = (*step.brought[InputKind.BATCH], *(known.part.inputs if known is not None else ()))
    batch = {i.target: zeros(i.spec, steps.device) for i in wanted if i.kind is InputKind.BATCH}
    with suppress(*ON_ZEROS):
        steps.brought(step, [batch] * step.layout.micro_batches)


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
