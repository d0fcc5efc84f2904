"""Measures what computes of the stages take, and how ranks of a machine slow each other down.

Ranks of a GPU each compute all at once, as they train. On a CPU they share cores and caches: their
computes are measured at once and apart, and from the two it is known what they take while only some
of them compute.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch.distributed as dist

from merakc.cluster import Sharing
from merakc.compiled_step import CompiledStep
from merakc.ir.program import ActionKind
from merakc.runtime.groups import together
from merakc.steps import Steps

# Trials of all ranks, as many as this time has room for, of which the median counts; and trials of
# one party, of which only the speed of all computes is wanted.
TRIALS, TIME_S = 9, 2.0
APART = 4
# The least share of its speed that a rank is believed to keep beside others.
LEAST_SPEED = 0.05
Seconds = Mapping[int, Mapping[ActionKind, float]]


@dataclass(frozen=True, slots=True)
class Rank:
    """What all ranks know of one: its machine and the cores there, the ranks with which it always
    computes at once (those of a tp group, and of dp where parameters are gathered over it), and how
    long a trial took; None where it failed.
    """

    machine: str
    cores: int
    party: tuple[int, int]
    trial_s: float | None


def measure_computes(steps: Steps, step: CompiledStep) -> tuple[Seconds | None, Sharing | None]:
    """Seconds of the computes of a micro-batch by stage, of a rank that computes alone where some
    share cores, and what they share; collective.

    No seconds for a rank whose stages do not run on the zeros that stand in for a batch.
    """
    groups, plan = steps.groups, step.lowered.plan
    gathered = any(plan.shards(s).parameters > 1 for s in range(len(plan.rank_of)))
    dp, pp, _ = groups.mesh.coordinates(groups.rank)
    start_s = time.perf_counter()
    works = steps.trial(step) is not None  # and warms up
    trial_s = time.perf_counter() - start_s if works else None
    cores, party = len(os.sched_getaffinity(0)), (pp, 0 if gathered else dp)
    ranks = together(lambda: Rank(socket.gethostname(), cores, party, trial_s))
    slowest_s = max((r.trial_s for r in ranks if r.trial_s is not None), default=TIME_S)
    count = min(TRIALS, max(1, round(TIME_S / slowest_s)))
    beside = _median([steps.trial(step) for _ in range(count)])
    if steps.device.type != "cpu" or len(ranks) == 1:
        return beside, None
    turns, ratio = turns_of(ranks), None
    for turn in range(max(turns) + 1) if max(turns) else ():
        if turn == turns[groups.rank]:
            apart = _median([steps.trial(step) for _ in range(min(APART, count))])
            ratio = _total(apart) / _total(beside) if apart and beside else None
        dist.barrier()
    ratios = [r for r in together(lambda: ratio) if r is not None]
    sharing = sharing_of(ranks, median(ratios) if ratios else 1.0)
    if beside is None:
        return None, sharing
    speed = sharing.speed(sharing.devices)  # most of a step, all compute
    return {s: {k: t * speed for k, t in own.items()} for s, own in beside.items()}, sharing


def measure_around(steps: Steps, step: CompiledStep) -> float:
    """Seconds of what a step does before and after its Program; of the slowest rank; collective."""
    seconds = []
    for _ in range(TRIALS):
        dist.barrier() if dist.is_initialized() else None
        start_s = time.perf_counter()
        steps.around(step)
        seconds.append(time.perf_counter() - start_s)
    return max(together(lambda: median(seconds)))


def turns_of(ranks: Sequence[Rank]) -> list[int]:
    """When each rank computes without the other parties of its machine; a party has one turn."""
    turns: dict[tuple[int, int], int] = {}
    for party in sorted({r.party for r in ranks}):
        machines = {r.machine for r in ranks if r.party == party}
        taken = {turns[r.party] for r in ranks if r.machine in machines and r.party in turns}
        turns[party] = next(k for k in itertools.count() if k not in taken)
    return [turns[r.party] for r in ranks]


def sharing_of(ranks: Sequence[Rank], ratio: float) -> Sharing:
    """What the ranks of the fullest machine share, where `ratio` is what a compute takes while only
    its party computes, relative to what it takes while all do.

    Between one and as many as there are cores the speed is taken for linear, and more ranks than
    cores take turns. Where a party fills the cores alone, its collectives leave some of them idle:
    then what a compute takes is linear from one party to all.
    """
    devices = max(Counter(r.machine for r in ranks).values())
    cores = min(devices, *(r.cores for r in ranks))
    party = _together(ranks)
    if cores <= party < devices:
        more_s = (1 / min(max(ratio, LEAST_SPEED), 1.0) - 1) / (devices - party)
        slowed = (1 / (1 + more_s * k) for k in range(1, devices - party + 1))
        return Sharing((*(1.0,) * party, *slowed), devices)
    share = 1.0
    if party < cores:
        near = (party - 1) / (cores - 1)
        share = ratio * (1 - near) / max(cores / devices - ratio * near, LEAST_SPEED)
    share = min(max(share, LEAST_SPEED), 1.0)
    steps = range(cores)
    return Sharing(tuple(1.0 + (share - 1.0) * k / max(cores - 1, 1) for k in steps), devices)


def _together(ranks: Sequence[Rank]) -> int:
    """The most ranks of a machine that are one party."""
    return max(Counter((r.machine, r.party) for r in ranks).values())


def _median(trials: Sequence[Seconds | None]) -> Seconds | None:
    """Of each compute; None where a trial failed."""
    done = [t for t in trials if t is not None]
    if len(done) < len(trials):
        return None
    return {
        s: {kind: median(t[s][kind] for t in done) for kind in own} for s, own in done[0].items()
    }


def _total(seconds: Seconds) -> float:
    return sum(sum(own.values()) for own in seconds.values())
