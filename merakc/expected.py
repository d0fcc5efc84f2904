"""What a step should cost, from the very graphs that these ranks compiled."""

from __future__ import annotations

from dataclasses import replace

from merakc.cluster import Cluster
from merakc.compiled_step import CompiledStep
from merakc.costs.lanes import chunk_collectives
from merakc.costs.sharded import OPTIMIZER_STATES, sunk_gradients
from merakc.costs.stage import stage_cost, with_seconds
from merakc.costs.timeline import program_memory, rank_times, verify_memory
from merakc.ir.graph import InputKind
from merakc.ir.plan import Prediction
from merakc.passes.collectives import chunk_touches
from merakc.predict import predict
from merakc.runtime.groups import together
from merakc.runtime.links import measure_link, measure_messages
from merakc.simulate import Simulation
from merakc.steps import Steps
from merakc.trials import measure_computes


def expected(
    steps: Steps, step: CompiledStep, cluster: Cluster, *, measured: bool
) -> tuple[Prediction, Simulation]:
    """What a step should cost, from the graphs that all stages really run.

    With `measured`, the seconds of the stages' pieces and of the links are measured here; without,
    they are the cluster's.
    """
    lowered = step.lowered
    plan = lowered.plan
    own = {
        s: stage_cost(chunk, cluster, plan.shards(s), plan.precision, plan.tied_shards(s))
        for s, chunk in step.chunks.items()
    }
    messages = None
    if measured:
        seconds, sharing = measure_computes(steps, step)
        if seconds is not None:
            own = {s: with_seconds(cost, seconds[s]) for s, cost in own.items()}
        cluster = replace(_linked(steps, cluster), sharing=sharing)
        pipeline = steps.groups.axis("pp")
        if steps.device.type == "cpu" and pipeline is not None:
            messages = measure_messages(steps.device, pipeline)
    touches = {s: chunk_touches(c) if plan.dp > 1 else {} for s, c in step.chunks.items()}
    inside = {s: chunk_collectives(s, chunk, cluster) for s, chunk in step.chunks.items()}
    found = together(lambda: {s: (cost, touches[s], inside[s]) for s, cost in own.items()})
    mesh, rank_of = plan.mesh, plan.rank_of
    of_stage = [found[mesh.rank(0, r, 0)][s] for s, r in enumerate(rank_of)]
    every = {s: touches for s, (_, touches, _) in enumerate(of_stage)}
    prediction, simulation = predict(
        lowered, cluster, tuple(c for c, *_ in of_stage), every,
        collectives={of: some for *_, inside in of_stage for of, some in inside.items()},
        messages=messages,
    )  # fmt: skip
    programs = lowered.with_collectives(lowered.programs(), every)
    times = rank_times(programs, simulation.events)[steps.groups.rank]
    static_bytes = _static_bytes(steps, step)
    buckets = steps.sharded.specs if steps.sharded else ()
    sunk = sunk_gradients(buckets, step.chunks.keys(), plan.precision)
    memory = program_memory(step.executor.program, step.chunks, static_bytes, times, sunk)

    def peak_bytes() -> int:
        if plan.order and plan.schedule != "auto":  # the user's own
            verify_memory(steps.groups.rank, memory, cluster.memory_bytes)
        return max((m.peak_bytes for m in memory), default=static_bytes)

    peaks = together(peak_bytes)
    first = tuple(peaks[mesh.rank(0, r, 0)] for r in range(mesh.pp))
    return replace(prediction, peak_bytes=first), simulation


def _linked(steps: Steps, cluster: Cluster) -> Cluster:
    """The cluster with the measured links of the first axis of several ranks; collective."""
    groups = steps.groups
    axis = next((a for a in ("dp", "pp", "tp") if getattr(groups.mesh, a) > 1), None)
    found = measure_link(steps.device, groups.axis(axis) if axis else None)
    return replace(cluster, link_latency_s=found[0], link_bytes_per_s=found[1])


def _static_bytes(steps: Steps, step: CompiledStep) -> int:
    """Parameters, buffers and constants of this rank, what an optimizer keeps of the first."""
    held = list(steps.state.values())
    constants = [c for s in step.executor.stages.values() for c in s.constants.values()]
    total = sum(t.nbytes for t in (*held, *constants))
    total += OPTIMIZER_STATES * sum(t.nbytes for t in held if t.requires_grad)
    plan, graph = step.lowered.plan, step.lowered.loss.graph
    if plan.precision:  # the batch as it is computed with
        batch = [i.spec for i in graph.inputs if i.kind is InputKind.BATCH]
        floats = sum(s.size_bytes for s in batch if s.dtype.is_floating_point)
        total += plan.micro_batches * floats
    return total + (steps.sharded.extra_bytes if steps.sharded else 0)
