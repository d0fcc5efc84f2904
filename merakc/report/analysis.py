"""Makes the Report of a plan: what it should cost, whose the cost is, and how that is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

from merakc.analysis.aliases import view_roots
from merakc.costs.buckets import tied_seconds
from merakc.costs.ranks import (
    least_spare,
    rank_devices,
    rank_memory_bytes,
    reserved_bytes,
    stage_devices,
)
from merakc.costs.work.kernels import Work, graph_work
from merakc.ir.costs import StageCost
from merakc.ir.graph import Graph, InputKind, Node, Ref
from merakc.ir.program import ActionKind
from merakc.ir.report import (
    Alternatives,
    HeadTimes,
    Origin,
    RankMemory,
    RankTimes,
    Report,
    StageTimes,
    Verdict,
)
from merakc.kernels.ring.attention import RING
from merakc.lowering.lowered import Lowered
from merakc.lowering.predict import planned_costs, predict, tied_bytes
from merakc.machines.cluster import Cluster, Factors
from merakc.report.annotation import source_files, top_nodes
from merakc.report.arenas import with_arenas
from merakc.report.attribution import attribute
from merakc.report.idle import idle_split
from merakc.report.packing import pack, placed
from merakc.report.traffic import traffic
from merakc.report.units import name_pattern
from merakc.report.waterfall import rank_memory
from merakc.simulation.simulate import Simulation

TOP_NODES = 20
# What a device draws while it waits for communication, of what it draws while it computes. From
# 128 to 2,048 H100 the throughput of each falls by 37 % and its power by 6 % (arXiv 2411.13055).
WAITING_POWER = 0.84


def make_report(
    lowered: Lowered,
    cluster: Cluster,
    *,
    simulation: Simulation | None = None,
    alternatives: Alternatives | None = None,
    places: bool = False,
) -> Report:
    """The report of a plan on a cluster, from one simulated step; with `places`, which takes some
    seconds, also how large an arena for all values of a step is.

    `simulation` is of dp rank 0 with the costs of the stages' graphs as calls, made where None.
    """
    plan = lowered.plan
    costs = planned_costs(lowered, cluster)
    simulation = simulation or predict(lowered, cluster, dp_rank=0)[1]
    own = [plan.mesh.rank(0, rank, 0) for rank in range(plan.pp)]
    found = attribute(lowered, cluster, costs)
    moved = traffic(lowered, cluster, simulation, found)
    ranks = _rank_times(lowered, cluster, simulation)
    tp_s = sum(axis.exposed_s for axis in moved if axis.axis == plan.form.axes)
    busy_s = sum(rank.compute_s for rank in ranks) / len(ranks) - tp_s
    memory = rank_memory(lowered, costs, simulation)
    if places:
        memory = with_arenas(memory, lowered)
    return Report(
        cluster=cluster.name,
        verdict=_verdict(lowered, cluster, simulation, busy_s),
        stages=tuple(_stage_times(lowered, cluster, costs)),
        ranks=ranks,
        memory=tuple(_limited(memory, lowered, cluster)),
        traffic=moved,
        nodes=top_nodes(found, TOP_NODES),
        node_count=len(found.step_seconds),
        files=source_files(found),
        origins=_origins(cluster),
        timeline=pack(placed(simulation, {rank: k for k, rank in enumerate(own)})),
        alternatives=alternatives,
        head=_head_times(lowered, cluster, costs, simulation),
        collectives=tp_collectives(lowered),
        exchanged=exchanged_heads(lowered),
        rings=rings(lowered),
        cut=lowered.cut,
    )


def tp_collectives(lowered: Lowered) -> dict[str, int]:
    """Those of one micro-batch: the forward's, and their conjugates in the backward."""
    if lowered.plan.lanes == 1:
        return {}
    ops, back = Counter[str](), Counter[str]()  # of all nodes, and of those that have gradients
    for graph in lowered.stages.local:
        grads = graph.grad_values()
        ops.update(node.op for node in graph.nodes)
        back.update(node.op for node in graph.nodes if not grads.isdisjoint(node.outs))
    scatters, gathers = ops["merakc.reduce_scatter.default"], ops["merakc.gather_to.default"]
    exchanges = tuple(
        f"merakc.{name}.default" for name in ("dispatch", "combine", "exchange", "swap")
    )
    found = {
        "forward all-reduce": ops["merakc.all_reduce.default"],
        "backward all-reduce": back["merakc.copy_to.default"],
        "forward reduce-scatter": scatters,
        "forward all-gather": gathers + ops["merakc.all_gather.default"],
        "backward reduce-scatter": back["merakc.gather_to.default"],
        "backward all-gather": back["merakc.reduce_scatter.default"]
        + back["merakc.scatter.default"],
        "forward all-to-all": sum(ops[op] for op in exchanges),
        "backward all-to-all": sum(back[op] for op in exchanges),
        "forward ring": ops[RING],
        "backward ring": back[RING],
        "vocabulary-parallel": sum(n for op, n in ops.items() if op.startswith("composite.")),
    }
    return {name: number for name, number in found.items() if number or "all-reduce" in name}


def exchanged_heads(lowered: Lowered) -> dict[str, int]:
    """The calls for which sequences are exchanged for heads, how many of each module and line."""
    return _calls(lowered.stages.sharding.exchanged(lowered.loss.graph))


def rings(lowered: Lowered) -> dict[str, int]:
    """The calls to which keys and values are passed around, how many of each module and line."""
    return _calls(lowered.stages.sharding.rings(lowered.loss.graph))


def _calls(nodes: Iterable[Node]) -> dict[str, int]:
    return dict(Counter(f"{name_pattern(node.module)} at {node.source}" for node in nodes))


def _head_times(
    lowered: Lowered, cluster: Cluster, costs: tuple[StageCost, ...], simulation: Simulation
) -> HeadTimes | None:
    """The step beside that of the same stages whose micro-batches wait for nothing."""
    if lowered.head_stage is None:
        return None
    alone = replace(lowered, loss=replace(lowered.loss, head=None))
    plain = tuple(replace(c, waist_bytes=0, tangent_bytes=0) for c in costs)
    other, _ = predict(alone, cluster, plain, dp_rank=0)
    return HeadTimes(
        costs[lowered.head_stage].head_s,
        simulation.step_s - other.step_s,
        max(simulation.peak_bytes) - max(other.peak_bytes),
    )


def _verdict(lowered: Lowered, cluster: Cluster, simulation: Simulation, busy_s: float) -> Verdict:
    """The step in figures; a rank computes in `busy_s` of it, in the mean."""
    plan, graph = lowered.plan, lowered.loss.graph
    steps = plan.dp * plan.micro_batches
    work = graph_work(graph)
    flops = steps * _flops(work)
    if lowered.loss.head is not None:
        flops += _flops(graph_work(lowered.loss.head.graph))
    rate, named = peak_rate(cluster, plan.mesh.world_size, main_dtype(work))
    peaks, memory = simulation.peak_bytes, rank_memory_bytes(cluster, plan.mesh)
    tightest = least_spare(peaks, memory)
    hardware, ranks = cluster.described(plan.mesh.world_size), plan.mesh.world_size
    device = rank_devices(hardware, plan.mesh)[tightest]
    waiting = 1.0 - busy_s / simulation.step_s if simulation.step_s else 0.0
    full_power_w = sum(device.power_w for device in hardware.devices[:ranks]) / ranks
    return Verdict(
        step_s=simulation.step_s,
        bubble_share=simulation.bubble_share,
        model_flops=flops,
        peak_flops_per_s=rate,
        peak_source=named,
        peak_bytes=peaks[tightest],
        peak_rank=tightest,
        memory_bytes=memory[tightest],
        ranks=ranks,
        samples=plan.batch_size * plan.dp,
        tokens=batch_tokens(graph) * steps,
        step_error=cluster.hardware.step_error if cluster.hardware else 0.0,
        reserved_bytes=reserved_bytes(device, plan.mesh),
        waiting_share=waiting,
        power_w=full_power_w * (1.0 - waiting * (1.0 - WAITING_POWER)),
    )


def _flops(work: Work) -> int:
    return sum(k.flops * n for own in (work.forward, work.backward) for k, n in own.items())


def peak_rate(cluster: Cluster, ranks: int, dtype: str) -> tuple[float, str]:
    """FLOPs a second of all ranks, and whose figure that is.

    The data sheets' for this dtype; where the cluster is a nominal one, its own.
    """
    if cluster.hardware is None:
        return ranks * cluster.flops_per_s, f"the nominal rate of {cluster.name}"
    devices = cluster.hardware.devices
    slowest = cluster.hardware.slowest
    used = [devices[k] if k < len(devices) else slowest for k in range(ranks)]
    rates = [{str(name): rate for name, rate in d.peak_flops_per_s.items()} for d in used]
    names = dict.fromkeys(d.name for d in used)
    total = sum(r.get(dtype, min(r.values())) for r in rates)
    return total, f"{', '.join(names)}'s peak rate in {dtype}"


def main_dtype(work: Work) -> str:
    """The dtype in which most is computed."""
    flops: Counter[str] = Counter()
    for kernels in (work.forward, work.backward):
        for kernel, count in kernels.items():
            flops[kernel.dtype] += kernel.flops * count
    return max(flops, key=flops.__getitem__, default="float32")


def batch_tokens(graph: Graph) -> int:
    """Elements of the largest tensor of a micro-batch that looks up an embedding; 0 without one."""
    sizes = {Ref(i.name): i.spec.numel for i in graph.inputs if i.kind is InputKind.BATCH}
    roots = view_roots(graph)
    read = (roots.get(r, r) for node in graph.nodes if "embedding" in node.op for r in node.refs)
    return max((sizes[ref] for ref in read if ref in sizes), default=0)


def _limited(
    found: Iterable[RankMemory], lowered: Lowered, cluster: Cluster
) -> Iterator[RankMemory]:
    """Adds the memory limit of each rank, where ranks do not all have the same."""
    limits = rank_memory_bytes(cluster, lowered.plan.mesh)
    for own, limit in zip(found, limits, strict=True):
        yield replace(own, limit_bytes=limit) if len(set(limits)) > 1 else own


def _stage_times(
    lowered: Lowered, cluster: Cluster, costs: Sequence[StageCost]
) -> list[StageTimes]:
    found = []
    devices = stage_devices(cluster, lowered.plan.mesh, lowered.plan.rank_of)
    for stage, (graph, cost) in enumerate(zip(lowered.stages.local, costs, strict=True)):
        held = [i.spec for i in graph.inputs if i.kind is InputKind.PARAMETER]
        found.append(
            StageTimes(
                stage,
                lowered.plan.rank_of[stage],
                sum(spec.numel for spec in held),
                parameter_bytes=sum(spec.size_bytes for spec in held),
                forward_s=cost.forward_s,
                backward_s=cost.backward_s,
                recompute_s=cost.recompute_s if lowered.plan.recompute != "none" else 0.0,
                saved_bytes=cost.saved_bytes,
                device=devices[stage].name,
            )
        )
    return found


def _rank_times(
    lowered: Lowered, cluster: Cluster, simulation: Simulation
) -> tuple[RankTimes, ...]:
    """What each rank does all the time of the step."""
    plan, local = lowered.plan, lowered.stages.local
    shared = [tied_bytes(plan, graph, stage) for stage, graph in enumerate(local)]
    added_s = [tied_seconds(sizes, plan.mesh, cluster) for sizes in shared]
    events = [event for event in simulation.events if event.kind is not ActionKind.GATHER]
    found = []
    for place, idle in enumerate(idle_split(events)):
        exposed_s, busy_s = simulation.exposed_s[place], simulation.busy_s[place]
        own = (e for e in events if e.rank == idle.rank)
        tied_s = sum(added_s[e.stage] for e in own if e.kind is ActionKind.REDUCE)
        waiting_s = sum(s for _, s in idle.waiting_s)
        found.append(
            RankTimes(
                place, busy_s - exposed_s - tied_s, exposed_s, tied_s=tied_s,
                warm_up_s=idle.warm_up_s, waiting_s=waiting_s,
                cool_down_s=idle.cool_down_s,
            )
        )  # fmt: skip
    return tuple(found)


def _origins(cluster: Cluster) -> tuple[Origin, ...]:
    """What the models are fed with: of an offline plan, at the most kernels were measured."""
    profiled = False
    if cluster.hardware is None:
        how = f"kernels at the nominal figures of {cluster.name}"
        links = f"latency and bandwidth of one nominal link, {cluster.link_bytes_per_s:.3g} B/s"
    else:
        devices = dict.fromkeys(n.device for n in cluster.hardware.nodes)
        sources = "; ".join(d.source or "the cluster file" for d in devices)
        how = f"kernels by shape on {', '.join(d.name for d in devices)} ({sources})"
        how += _corrected(cluster.hardware.factors, "forward", "backward")
        sources = "; ".join(dict.fromkeys(n.source for n in cluster.hardware.links if n.source))
        links = f"rings and trees by size and level ({sources or 'the cluster file'})"
        links += _corrected(cluster.hardware.factors, "collectives")
        profiled = all(d.profile is not None for d in devices)
    of_kernels: Literal["measured", "modelled"] = "measured" if profiled else "modelled"
    return (
        Origin("seconds of stages", of_kernels, how),
        Origin("seconds of messages and collectives", "modelled", links),
        Origin("the step, waits and bubbles", "modelled", "simulated, the runtime's own actions"),
        Origin("memory", "modelled", "live ranges of the forward; the optimizer keeps 2 numbers"),
    )


def _corrected(factors: Factors, *kinds: str) -> str:
    """What measured steps have to say of these kinds."""
    found = [f"{kind} x {getattr(factors, kind):.2f}" for kind in kinds]
    return f", corrected by {factors.source}: {', '.join(found)}" if factors.source else ""
