"""From a recording to a plan, and from a plan to the graphs of its stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from merakc.cluster import Cluster
from merakc.costs.flops import graph_flops
from merakc.costs.memory import backward_live_bytes, live_bytes, saved_bytes
from merakc.costs.roofline import graph_seconds
from merakc.errors import PlanError
from merakc.frontend.fingerprint import fingerprint, first_difference
from merakc.frontend.record import Recording
from merakc.ir.costs import CostTable, StageCost
from merakc.ir.graph import Graph, InputKind, Output, OutputKind
from merakc.ir.layout import Layout, parse_layout
from merakc.ir.plan import OpaqueModule, Plan, Prediction
from merakc.ir.program import Chunk, Mesh, Program
from merakc.kernels.opaque import OPAQUE, find
from merakc.passes.differentiate import differentiate
from merakc.passes.gather_products import gather_all, gather_products, gathers
from merakc.passes.localise import localise
from merakc.passes.schedule import build_programs
from merakc.passes.separate_heads import separate_heads
from merakc.passes.shard import shard
from merakc.passes.sharding import Sharding
from merakc.passes.stages import (
    Stages,
    assign_stages,
    split_stages,
    stage_runs,
    stages_of_runs,
    transfer_stages,
)
from merakc.passes.weigh_loss import WeighedLoss, weigh_loss
from merakc.simulate import Simulation, simulate
from merakc.version import __version__

# Adam and AdamW keep two numbers a parameter, beside the parameter and its gradient.
OPTIMIZER_STATES = 2
# A backward is about two forwards: the gradients of both arguments of every product.
BACKWARD_PER_FORWARD = 2.0


@dataclass(frozen=True)
class Lowered:
    """A plan applied to a recording: what every rank agrees on, before any rank's own graphs."""

    plan: Plan
    loss: WeighedLoss
    stages: Stages

    def chunk(self, stage: int, tp_rank: int, *, train: bool = True) -> Chunk:
        """The executable graphs of one rank; without `train` no backward."""
        local = localise(self.stages.graphs[stage], self.stages.sharding, tp_rank)
        if not train:
            frozen = tuple(replace(i, requires_grad=False) for i in local.inputs)
            local = replace(local, inputs=frozen)
        return differentiate(local)

    def programs(self, *, forward_only: bool = False) -> tuple[Program, ...]:
        """The actions of every rank."""
        plan = self.plan
        return build_programs(
            plan.mesh, plan.schedule, plan.micro_batches, self.stages.transfers,
            forward_only=forward_only,
        )  # fmt: skip


def training_graph(graph: Graph) -> Graph:
    """Only what training needs: the loss and the written buffers."""
    kinds = (OutputKind.LOSS, OutputKind.BUFFER)
    outputs = tuple(o for o in graph.outputs if o.kind in kinds)
    return with_outputs(graph, outputs)


def with_outputs(graph: Graph, outputs: tuple[Output, ...]) -> Graph:
    """The graph with these outputs, and nothing that they do not need."""
    pruned = replace(graph, outputs=outputs).pruned()
    read = {r.node for n in pruned.nodes for r in n.refs} | {o.ref.node for o in pruned.outputs}
    return replace(pruned, inputs=tuple(i for i in pruned.inputs if i.name in read))


def make_plan(
    recording: Recording,
    mesh: Mesh,
    micro_batches: int,
    cluster: Cluster,
    *,
    batch_size: int = 0,
    schedule: str = "1f1b",
    recompute: str = "none",
    sequence_parallel: bool = False,
) -> tuple[Plan, Lowered]:
    """Decides the tensor split and the stages of a recorded forward for one mesh of ranks.

    Raises `CutError` where the graph does not give `mesh.pp` stages, `ShardError` where it does not
    divide over `mesh.tp` ranks.
    """
    loss = _weighed(training_graph(recording.graph), mesh.tp)
    sharding = shard(loss.graph, mesh.tp, cluster=cluster, sequence_parallel=sequence_parallel)
    of, report = assign_stages(loss.graph, sharding, mesh.pp, cluster)
    stages = split_stages(loss.graph, of, mesh.pp, sharding)
    splits = sharding.splits(loss.graph)
    gathered = gathers(loss.graph)
    splits |= _splits_of_results(recording.graph, splits, mesh.tp, gathered=gathered)
    plan = Plan(
        model=recording.model_name,
        dp=mesh.dp,
        tp=mesh.tp,
        pp=mesh.pp,
        batch_size=batch_size,
        micro_batches=micro_batches,
        schedule=schedule,
        recompute=recompute,
        graph=fingerprint(recording.graph),
        stages=stage_runs(loss.graph, of),
        parameters=_holders(stages.graphs),
        splits={name: str(layout) for name, layout in splits.items()},
        collectives=_collectives(stages),
        cut=report,
        whole_ops=tuple(o for o in sharding.whole_ops(loss.graph) if not o.startswith(OPAQUE)),
        opaque_modules=_opaque_modules(loss.graph),
        sequence_parallel=bool(sharding.sequences),
        merakc_version=__version__,
    )
    return plan, Lowered(plan, loss, stages)


def apply_plan(plan: Plan, recording: Recording) -> Lowered:
    """Applies a plan to the very graph that it was made from.

    Raises `PlanError` with the first difference on any other.
    """
    difference = first_difference(plan.graph, fingerprint(recording.graph))
    if difference:
        raise PlanError(
            f"the plan was made for another graph ({plan.model}): {difference}; make the plan "
            "again with this model, batch shape and dtype"
        )
    loss = _weighed(training_graph(recording.graph), plan.tp)
    sharding = _sharding(loss.graph, plan)
    of = stages_of_runs(loss.graph, plan.stages)
    return Lowered(plan, loss, split_stages(loss.graph, of, plan.pp, sharding))


def adapt_plan(lowered: Lowered, recording: Recording, *, results: bool) -> Lowered:
    """Applies a plan to another recording of the same model: eval mode, or other shapes.

    Parameters stay where they are; with `results`, everything that the forward returns is
    computed, otherwise the loss alone.
    """
    plan = lowered.plan
    graph = recording.graph if results else training_graph(recording.graph)
    graph = with_outputs(graph, graph.outputs)
    loss = _weighed(graph, plan.tp, gathered=gathers(lowered.loss.graph))
    sharding = _sharding(loss.graph, plan)
    of = transfer_stages(loss.graph, lowered.loss.graph, lowered.stages.of, plan.parameters)
    return Lowered(plan, loss, split_stages(loss.graph, of, plan.pp, sharding))


def stage_cost(chunk: Chunk, cluster: Cluster, plan: Plan) -> StageCost:
    """The cost of a stage from its own graphs, forward and backward."""
    forward_s = graph_seconds(chunk.forward, cluster)
    backward_s = graph_seconds(chunk.backward, cluster) if chunk.backward else 0.0
    forward, saved = live_bytes(chunk.forward), saved_bytes(chunk)
    backward_peak = backward_live_bytes(chunk).peak_bytes
    if plan.recompute == "full":
        held = [i for i in chunk.forward.inputs if i.kind is InputKind.ACTIVATION]
        inputs = sum(i.spec.size_bytes for i in held)
        backward_s += forward_s
        backward_peak += saved - inputs
        saved = inputs
    return StageCost(
        forward_s=forward_s,
        backward_s=backward_s,
        saved_bytes=saved,
        forward_peak_bytes=forward.peak_bytes,
        backward_peak_bytes=backward_peak,
        static_bytes=static_bytes(chunk.forward),
    )


def rough_stage_cost(local: Graph, cluster: Cluster, plan: Plan) -> StageCost:
    """The cost of a stage from its forward alone: for planning, where nothing is differentiated."""
    forward_s = graph_seconds(local, cluster)
    specs = [spec for n in local.nodes for spec in n.outputs if spec is not None]
    everything = sum(spec.size_bytes for spec in specs)
    received = sum(i.spec.size_bytes for i in local.inputs if i.kind is InputKind.ACTIVATION)
    full = plan.recompute == "full"
    return StageCost(
        forward_s=forward_s,
        backward_s=forward_s * (BACKWARD_PER_FORWARD + full),
        saved_bytes=received if full else everything,
        forward_peak_bytes=live_bytes(local).peak_bytes if full else everything,
        backward_peak_bytes=everything if full else live_bytes(local).peak_bytes,
        static_bytes=static_bytes(local),
    )


def static_bytes(graph: Graph) -> int:
    """Parameters, buffers and constants; gradients and optimizer state of the trained ones."""
    total = 0
    for item in graph.inputs:
        if item.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT):
            copies = 2 + OPTIMIZER_STATES if item.requires_grad else 1
            total += copies * item.spec.size_bytes
    return total


def predict(
    lowered: Lowered, cluster: Cluster, costs: tuple[StageCost, ...] | None = None
) -> tuple[Prediction, Simulation]:
    """Simulates one step. Without `costs` of the stages, rough ones are used."""
    if costs is None:
        costs = tuple(rough_stage_cost(g, cluster, lowered.plan) for g in lowered.stages.local)
    dp = lowered.plan.dp
    costs = tuple(
        replace(c, reduce_s=_reduce_seconds(g, dp, cluster))
        for c, g in zip(costs, lowered.stages.local, strict=True)
    )
    table = CostTable(costs, cluster.link_latency_s, cluster.link_bytes_per_s)
    simulation = simulate(lowered.programs(), table)
    mesh = lowered.plan.mesh
    peaks = tuple(simulation.peak_bytes[mesh.rank(0, s, 0)] for s in range(mesh.pp))
    return Prediction(simulation.step_s, simulation.bubble_share, peaks), simulation


def _reduce_seconds(local: Graph, dp: int, cluster: Cluster) -> float:
    """A ring all-reduce of the stage's gradients over dp: 2 (dp - 1) / dp times their bytes."""
    if dp == 1:
        return 0.0
    trained = [i for i in local.inputs if i.kind is InputKind.PARAMETER and i.requires_grad]
    grads_bytes = sum(i.spec.size_bytes for i in trained)
    return cluster.link_latency_s + 2 * (dp - 1) / dp * grads_bytes / cluster.link_bytes_per_s


def _weighed(graph: Graph, tp: int, *, gathered: bool | None = None) -> WeighedLoss:
    """The graph that is sharded and cut, with losses of micro-batches that add up.

    `gathered` says whether its products are to be gathered; where it is None, the graph does.
    """
    loss = weigh_loss(graph)
    found = separate_heads(loss.graph, tp)
    if gathered is None:
        found = gather_products(found, tp)
    elif gathered:
        found = gather_all(found)
    return replace(loss, graph=found)


def _splits_of_results(
    graph: Graph, splits: Mapping[str, Layout], tp: int, *, gathered: bool
) -> dict[str, Layout]:
    """The layouts of the split tensors that only the results read, as the given splits demand."""
    trained = {i.target for i in training_graph(graph).inputs}
    kinds = (InputKind.PARAMETER, InputKind.BUFFER)
    if tp == 1 or all(i.target in trained for i in graph.inputs if i.kind in kinds):
        return {}
    whole = _weighed(graph, tp, gathered=gathered).graph
    try:
        found = shard(whole, tp, splits).splits(whole)
    except PlanError:  # the results need whole what training splits: `predict` refuses them
        return {}
    return {name: layout for name, layout in found.items() if name not in trained}


def _sharding(graph: Graph, plan: Plan) -> Sharding:
    splits = {name: parse_layout(text) for name, text in plan.splits.items()}
    return shard(graph, plan.tp, splits, sequence_parallel=plan.sequence_parallel)


def _holders(graphs: tuple[Graph, ...]) -> dict[str, tuple[int, ...]]:
    holders: dict[str, list[int]] = {}
    for stage, graph in enumerate(graphs):
        for item in graph.inputs:
            if item.kind is InputKind.PARAMETER:
                holders.setdefault(item.target, []).append(stage)
    return {name: tuple(stages) for name, stages in holders.items()}


def _opaque_modules(graph: Graph) -> tuple[OpaqueModule, ...]:
    """The modules that run as they are, each once, with what all their calls compute."""
    total = max(graph_flops(graph), 1)
    calls = [find(node.args[-1]) for node in graph.nodes if node.op == OPAQUE]
    flops: Counter[str] = Counter()
    for call in calls:
        flops[call.module] += call.flops
    seen = {c.module: c for c in reversed(calls)}
    return tuple(
        OpaqueModule(name, seen[name].source, seen[name].reason, flops[name] / total)
        for name in dict.fromkeys(c.module for c in calls)
    )


def _collectives(stages: Stages) -> dict[str, int]:
    """Tp collectives of one micro-batch: the forward's, and their conjugates in the backward."""
    if stages.sharding.tp == 1:
        return {}
    ops = Counter(node.op for graph in stages.local for node in graph.nodes)
    scatters, gathers = ops["merakc.reduce_scatter.default"], ops["merakc.gather_to.default"]
    found = {
        "forward all-reduce": ops["merakc.all_reduce.default"],
        "backward all-reduce": ops["merakc.copy_to.default"],
        "forward reduce-scatter": scatters,
        "forward all-gather": gathers + ops["merakc.all_gather.default"],
        "backward reduce-scatter": gathers,
        "backward all-gather": scatters + ops["merakc.scatter.default"],
        "vocabulary-parallel": sum(n for op, n in ops.items() if op.startswith("composite.")),
    }
    return {name: number for name, number in found.items() if number or "all-reduce" in name}
