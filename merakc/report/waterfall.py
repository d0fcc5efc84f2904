"""What the memory of each rank holds at its peak in the simulated step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from merakc.costs.work.sharded import graph_state_bytes
from merakc.ir.costs import StageCost
from merakc.ir.graph import InputKind
from merakc.ir.report import RankMemory
from merakc.lowering.lowered import Lowered
from merakc.simulation.simulate import Simulation


def rank_memory(
    lowered: Lowered, costs: Sequence[StageCost], simulation: Simulation
) -> Iterator[RankMemory]:
    """The parts of every rank's peak."""
    for place, peak in enumerate(simulation.peaks):
        stages = [s for s, holder in enumerate(lowered.plan.rank_of) if holder == place]
        parts = _static(lowered, costs, stages)
        parts["gradients_bytes"] += peak.reduced_bytes
        yield RankMemory(
            place, peak.action, peak.in_flight, **parts,
            activations_bytes=peak.activations_bytes, messages_bytes=peak.messages_bytes,
            transient_bytes=peak.transient_bytes,
        )  # fmt: skip


def _static(lowered: Lowered, costs: Sequence[StageCost], stages: Sequence[int]) -> Counter[str]:
    """What is there all along, by the fields of `RankMemory`."""
    plan, total = lowered.plan, Counter[str]()
    for stage in stages:
        graph = lowered.stages.local[stage]
        state = graph_state_bytes(
            graph, plan.shards(stage), plan.precision, plan.other_shards(stage), plan.on_host
        )
        frozen_bytes = 0
        if plan.shards(stage).parameters == 1:  # those are in no bucket, unless they are fetched
            own = (i for i in graph.inputs if i.kind is InputKind.PARAMETER and not i.requires_grad)
            fetched = plan.on_host.kept
            frozen_bytes = sum(i.spec.size_bytes for i in own if i.target not in fetched)
        parts = {
            "parameters_bytes": state.parameter_bytes + frozen_bytes,
            "gathered_bytes": state.gathered_bytes,
            "gradients_bytes": state.summed_bytes + state.filling_bytes,
            "optimizer_bytes": state.kept_bytes - state.parameter_bytes,
        }
        rest = costs[stage].static_bytes - sum(parts.values())
        total.update({**parts, "buffers_bytes": rest})
    return total
