"""What moving optimizer state to the host makes of a strategy, by the pieces of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

from merakc.costs.host import host_bytes, host_update
from merakc.costs.stages import optimizer_seconds
from merakc.ir.offload import NONE, OPTIMIZER, PARAMETERS, offload_text, parse_offload
from merakc.ir.state import StateShards
from merakc.machines.cluster import Hardware
from merakc.machines.links import Host
from merakc.planner.estimate import Estimate
from merakc.planner.job import Job

# The shards, the kind of recomputation, and what a step takes with them.
Priced = tuple[StateShards, str, Estimate]
T = TypeVar("T")


def host_for(asked: str, hardware: Hardware) -> Host | None:
    """The memory that optimizer state may move to, if it is asked for and there is any."""
    return hardware.host if parse_offload(asked).may(OPTIMIZER) else None


def moves_all(asked: str) -> bool:
    """Whether all of the optimizer's state is to be on the host, and not what has no room alone."""
    offload = parse_offload(asked)
    return offload.may(OPTIMIZER) and not offload.as_needed and offload.size_bytes is None


def priced(
    asked: str, job: Job, hardware: Hardware, fit: Callable[[Job], list[Priced] | T]
) -> tuple[list[Priced] | T, str]:
    """What `fit` finds for a job, and the kinds of tensors that are on the host for it: none where
    it fits without, unless all of them are to be there.
    """
    found, host, everything = fit(job), host_for(asked, hardware), moves_all(asked)
    if host is None or (isinstance(found, list) and not everything):
        return found, NONE
    offload = parse_offload(asked)
    for kinds in ((OPTIMIZER,), (OPTIMIZER, PARAMETERS)):
        fetches = PARAMETERS in kinds
        if offload.may(PARAMETERS) if fetches else not offload.moves_parameters:
            bare = fit(without_state(job, parameters=fetches))
            priced = isinstance(bare, list) and [*moved(bare, job, host, everything=everything)]
            fitting = [*fetched(priced or (), job, host)] if fetches else priced
            if fitting:
                return fitting, offload_text(set(kinds))
    return found, NONE


def without_state(job: Job, *, parameters: bool = False) -> Job:
    """The job with all of the optimizer's state elsewhere than on the devices, perhaps with its
    `parameters`. Gradients of one micro-batch of one rank leave as they are made.
    """
    framework, strategy = job.framework, job.strategy
    precision = replace(framework.precision, optimizer_bytes=0)
    if strategy.micro_batches == strategy.state_ranks == 1:
        precision = replace(precision, gradient_bytes=0)
    if parameters:
        precision = replace(precision, parameter_bytes=0)
    return replace(job, framework=replace(framework, precision=precision), fetches=parameters)


def fetched(found: Iterable[Priced], job: Job, host: Host) -> Iterator[Priced]:
    """What was priced without parameters on the devices, of ranks that update what they keep: it
    comes in each forward and backward, which take no less time than that.
    """
    for way, recompute, estimate in found:
        if way.updates_what_it_keeps:
            kept_bytes = max(job.owned(way)) * job.framework.precision.parameter_bytes
            fetch_s = 2 * job.strategy.micro_batches * host.up.seconds(kept_bytes)
            step_s = max(estimate.step_s, fetch_s + estimate.optimizer_s)
            yield way, recompute, replace(estimate, step_s=step_s)


def moved(found: Iterable[Priced], job: Job, host: Host, *, everything: bool) -> Iterator[Priced]:
    """What was priced without the optimizer's state on the devices, with the part of it there that
    they have room for, unless `everything` moves; less what a host has no room for.

    What the link and the host take is added to the step: nothing of it is known to be hidden.
    """
    precision = job.framework.precision
    for way, recompute, estimate in found:
        peaks, seconds, most_bytes = [], [0.0], 0
        for rank, owned in enumerate(job.owned(way)):
            peak = estimate.peak_bytes[rank]
            spare = max(job.memory_bytes[rank] - peak, 0) // precision.optimizer_bytes
            stays = 0 if everything else min(owned, spare)
            peaks.append(peak + stays * precision.optimizer_bytes)
            seconds.append(optimizer_seconds(stays, precision, job.places[rank]))
            seconds[-1] += host_update(owned - stays, precision, host).total_s
            most_bytes = max(most_bytes, host_bytes(owned - stays, precision))
        if most_bytes <= host.memory_bytes:
            optimizer_s = max(seconds)
            step_s = estimate.step_s - estimate.optimizer_s + optimizer_s
            told = replace(
                estimate, step_s=step_s, optimizer_s=optimizer_s, peak_bytes=tuple(peaks)
            )
            yield way, recompute, told
