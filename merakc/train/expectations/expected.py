"""What a step should cost, from the very graphs that these ranks compiled."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from merakc.analysis.buckets import ahead
from merakc.costs.device import place_on
from merakc.costs.head import head_bytes, with_head
from merakc.costs.nodes import chunk_collectives
from merakc.costs.spent import by_rank, merged
from merakc.costs.stage import stage_cost, with_seconds
from merakc.costs.timeline import Times, program_memory, rank_times, verify_memory
from merakc.costs.work.sharded import (
    OPTIMIZER_STATES,
    read_at_once,
    sunk_gradients,
    whole_bytes,
)
from merakc.ir.costs import StageCost
from merakc.ir.graph import InputKind
from merakc.ir.plan_file import Measured, Prediction
from merakc.ir.program import ActionKind
from merakc.ir.recompute import IN_BACKWARD
from merakc.lowering.predict import predict
from merakc.machines.cluster import Cluster
from merakc.passes.programs.collectives import stage_touches
from merakc.runtime.groups import together
from merakc.runtime.links import measure_link, measure_messages
from merakc.simulation.nccl import verify_calls
from merakc.simulation.simulate import Simulation
from merakc.train.compiled_step import CompiledStep
from merakc.train.expectations.trials import (
    Batch,
    Seconds,
    measure_around,
    measure_computes,
    shared_cores,
    values_of,
)
from merakc.train.steps import Steps
from merakc.train.told import begin
from merakc.version import __version__

# How often the seconds of computes are corrected that take turns.
ROUNDS = 4


def expected(
    steps: Steps, step: CompiledStep, cluster: Cluster, example: Batch | None
) -> tuple[Prediction, Simulation, Measured | None]:
    """What a step should cost, from the graphs that all stages really run, and what was measured.

    With a batch as an `example`, the seconds of the stages' pieces and of the links are measured
    here, where the plan does not bring them along; without, they are the cluster's. Collective.
    """
    lowered = step.lowered
    plan = lowered.plan
    begin("measuring a step")
    own = {s: _stage_cost(step, s, cluster) for s in step.chunks}
    here = _measured(steps, step, example) if example is not None else None
    if here is not None:
        own = {s: _with_seconds(cost, here.seconds[s]) for s, cost in own.items()}
        latency_s, bytes_per_s = here.link
        cluster = replace(
            cluster, link_latency_s=latency_s, link_bytes_per_s=bytes_per_s, sharing=here.sharing
        )
    touches = {s: stage_touches(c) if plan.has_collectives else {} for s, c in step.chunks.items()}
    place = place_on(cluster, plan.tp, cp=plan.cp)
    inside = {s: chunk_collectives(s, chunk, place) for s, chunk in step.chunks.items()}
    found = together(lambda: {s: (cost, touches[s], inside[s]) for s, cost in own.items()})
    mesh, rank_of = plan.mesh, plan.rank_of
    of_stage = [found[mesh.rank(0, r, 0)][s] for s, r in enumerate(rank_of)]
    every = {s: touches for s, (_, touches, _) in enumerate(of_stage)}
    costs = tuple(c for c, *_ in of_stage)
    collectives = {of: some for *_, inside in of_stage for of, some in inside.items()}
    messages = here.messages if here else None
    overlap = 1.0 if here else None  # what collectives cost computes has been measured with these

    def simulated(costs: tuple[StageCost, ...]) -> tuple[Prediction, Simulation]:
        return predict(
            lowered, cluster, costs, every, collectives=collectives, messages=messages,
            overlap=overlap,
        )  # fmt: skip

    if here is not None:
        costs = _apart(costs, lambda own: simulated(own)[1], here)
    prediction, simulation = simulated(costs)
    programs = lowered.with_collectives(lowered.programs(), every)
    verify_calls(programs, lowered.wiring())
    times = rank_times(programs, simulation.events)[steps.groups.rank]
    peaks = together(lambda: _peak_bytes(steps, step, cluster, times))
    first = tuple(peaks[mesh.rank(0, r, 0)] for r in range(mesh.pp))
    step_s = prediction.step_s + (here.around_s if here else 0.0)
    return replace(prediction, step_s=step_s, peak_bytes=first), simulation, here


def _stage_cost(step: CompiledStep, stage: int, cluster: Cluster) -> StageCost:
    """Of a stage of this rank, from its graphs."""
    plan = step.lowered.plan
    cost = stage_cost(
        step.chunks[stage], place_on(cluster, plan.tp, cp=plan.cp), plan.shards(stage),
        plan.precision, plan.other_shards(stage), on_host=plan.on_host,
        fused=step.lowered.compiled, in_buckets=plan.has_buckets,
    )  # fmt: skip
    head = step.executor.head
    if head is None or stage != step.lowered.head_stage:
        return cost
    return with_head(cost, head.head, head.chunk, head.layout, plan.mesh, cluster)


def _peak_bytes(steps: Steps, step: CompiledStep, cluster: Cluster, times: Times) -> int:
    """Of this rank. Raises `ProgramError` where an order of the user's own does not fit."""
    plan, static_bytes = step.lowered.plan, _static_bytes(steps, step)
    buckets = steps.sharded.specs if steps.sharded else ()
    sunk = sunk_gradients(buckets, step.chunks.keys(), plan.precision, one=plan.on_host.one)
    runner = step.executor.head
    memory = program_memory(
        step.executor.program, step.chunks, static_bytes, times, sunk, fused=step.lowered.compiled,
        head=head_bytes(runner.head, runner.chunk, runner.layout) if runner else None,
    )  # fmt: skip
    if plan.order and plan.schedule != "auto":
        verify_memory(steps.groups.rank, memory, cluster.memory_bytes)
    return max((m.peak_bytes for m in memory), default=static_bytes)


def _apart(
    costs: tuple[StageCost, ...],
    simulated: Callable[[tuple[StageCost, ...]], Simulation],
    here: Measured,
) -> tuple[StageCost, ...]:
    """What computes take on ranks with a core each, of what they took in a step.

    More ranks than cores take turns: it is looked for with which seconds the simulated computes,
    which do so too, take on average what was measured.
    """
    if here.sharing is None or here.sharing.cores == here.sharing.devices:
        return costs
    apart = [dict(own) for own in here.seconds]
    for _ in range(ROUNDS):
        for own in merged(by_rank(simulated(costs).events)):
            if own.seconds and own.kind in apart[own.stage]:
                measured_s = here.seconds[own.stage][own.kind] * own.count
                apart[own.stage][own.kind] *= measured_s / own.seconds
        costs = tuple(map(_with_seconds, costs, apart))
    return costs


def _with_seconds(cost: StageCost, seconds: Mapping[str, float]) -> StageCost:
    return with_seconds(cost, {ActionKind(kind): took_s for kind, took_s in seconds.items()})


def _measured(steps: Steps, step: CompiledStep, example: Batch) -> Measured:
    """What the ranks measure, or have measured of this plan on machines like these; collective."""
    plan, groups = step.lowered.plan, steps.groups
    machines = "; ".join(dict.fromkeys(together(lambda: _machine(steps))))
    where = f"plan {plan.hash[:16]} on {machines}"
    before = steps.file.measured
    if before is not None and before.where == where:
        return before
    trials = measure_computes(steps, step, values_of(steps, step, example))
    seconds = stage_seconds(steps, trials)
    axis = next((a for a in ("dp", "pp", "tp", "cp") if getattr(plan.mesh, a) > 1), None)
    link = measure_link(steps.device, groups.axis(axis) if axis else None)
    messages, pipeline = None, groups.axis("pp")
    if steps.device.type == "cpu" and pipeline is not None:
        messages = measure_messages(steps.device, pipeline)
    around_s = measure_around(steps, step, example)
    return Measured(where, seconds, link, messages, shared_cores(steps.device), around_s)


def stage_seconds(steps: Steps, trials: Sequence[Seconds]) -> tuple[dict[str, float], ...]:
    """Seconds of each stage's computes, of this rank's `trials` and the others'; collective."""
    plan, everyone, found = steps.planned.plan, together(lambda: trials), []
    for stage, rank in enumerate(plan.rank_of):
        held = [e for k, e in enumerate(everyone) if plan.mesh.coordinates(k)[1] == rank]
        found.append(_of_slowest([[trial[stage] for trial in own] for own in held]))
    return tuple(found)


def _of_slowest(ranks: Sequence[Sequence[Mapping[ActionKind, float]]]) -> dict[str, float]:
    """The median over trials of what the slowest rank took, for which the others wait."""
    trials = [max(each, key=lambda own: sum(own.values())) for each in zip(*ranks, strict=False)]
    kinds = trials[0] if trials else ()
    return {str(kind): median(own[kind] for own in trials) for kind in kinds}


def _machine(steps: Steps) -> str:
    """What this rank's seconds depend on, beside its plan."""
    if steps.device.type == "cuda":
        device = torch.cuda.get_device_name(steps.device)
    else:
        cores = len(os.sched_getaffinity(0))
        device = f"{_processor()}, {cores} cores, {torch.get_num_threads()} threads"
    by = (", compiled" if steps.fuser else "") + (", oneDNN" if steps.planned.onednn else "")
    return f"{device}{by}, torch {torch.__version__}, merakc {__version__}"


def _processor() -> str:
    """The name of the CPU."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _static_bytes(steps: Steps, step: CompiledStep) -> int:
    """Parameters, buffers and constants of this rank, what an optimizer keeps of the first."""
    constants = [c for s in step.executor.stages.values() for c in s.constants.values()]
    on_host = step.lowered.plan.on_host
    beside = {*on_host.updated, *on_host.kept}
    held = [t for name, t in steps.state.items() if name not in beside]
    total = sum(t.nbytes for t in (*held, *constants))
    total += OPTIMIZER_STATES * sum(t.nbytes for t in held if t.requires_grad)
    plan, graph = step.lowered.plan, step.lowered.loss.graph
    if plan.precision:  # the batch as it is computed with
        batch = [i.spec for i in graph.inputs if i.kind is InputKind.BATCH]
        floats = sum(s.size_bytes for s in batch if s.dtype.is_floating_point)
        total += plan.micro_batches * floats
    if steps.sharded is None:
        return total
    backwards = [c.backward for c in step.chunks.values() if c.backward is not None]
    read = max(map(read_at_once, backwards), default=0) if plan.recompute in IN_BACKWARD else 0
    sizes, count = steps.sharded.gathered_sizes, ahead(steps.sharded.specs)
    return total + steps.sharded.extra_bytes + whole_bytes(sizes, read, count)
