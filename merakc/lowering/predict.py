"""What a plan should cost: the simulated step of its Programs, on a cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from merakc.costs.buckets import bucket_seconds, dp_group, mesh_fabric, tied_seconds
from merakc.costs.device import place_on
from merakc.costs.head import even_layout, with_head
from merakc.costs.host import HostUpdate, host_update, left_seconds
from merakc.costs.pipeline_links import pipeline_links
from merakc.costs.ranks import stage_devices
from merakc.costs.stage import faster, with_messages
from merakc.costs.state import Precision
from merakc.costs.work.sharded import OPTIMIZER_STATES
from merakc.ir.costs import CostTable, GraphCollectives, StageCost
from merakc.ir.graph import Graph, InputKind
from merakc.ir.plan import Plan
from merakc.ir.plan_file import Prediction
from merakc.ir.program import CollectiveKind, Mesh
from merakc.lowering.graph_costs import graph_costs
from merakc.lowering.lowered import Lowered
from merakc.lowering.overlap import overlap_gains
from merakc.machines.cluster import Cluster
from merakc.machines.links import Link
from merakc.passes.pipeline import called_pieces
from merakc.passes.programs.collectives import Touches
from merakc.simulation.simulate import Simulation, simulate


def predict(
    lowered: Lowered,
    cluster: Cluster,
    costs: tuple[StageCost, ...] | None = None,
    touches: Mapping[int, Touches] | None = None,
    *,
    dp_rank: int | None = None,
    collectives: GraphCollectives | None = None,
    messages: tuple[float, float] | None = None,
    overlap: float | None = None,
    traced: bool = True,
) -> tuple[Prediction, Simulation]:
    """Simulates one step, of all ranks or of one dp rank's, which stands for all.

    Unless it is to be `traced`, the simulation holds no events.

    Without `costs` of the stages, those of their graphs as calls are used, and without `touches`
    rough ones; `collectives` are those that the timeline is to show of the stages' graphs,
    `messages` the latency and the bytes a second of those between stages, `overlap` the share of
    their speed that collectives over dp have beside computes, otherwise that of the cluster.
    """
    mesh = lowered.plan.mesh
    if costs is None:
        cluster = cluster.with_hardware(mesh.world_size)
        costs = planned_costs(lowered, cluster)
    table = cost_table(lowered, cluster, costs, messages)
    table = replace(table, collectives=collectives or {})
    if overlap is not None:
        table = replace(table, overlap=overlap)
    ranks = [mesh.rank(dp_rank or 0, r, 0) for r in range(mesh.pp)]
    programs = lowered.programs(ranks=None if dp_rank is None else ranks)
    placed = lowered.with_collectives(programs, touches)
    simulation = simulate(placed, table, head=lowered.head_stage, mesh=mesh, traced=traced)
    places = ranks if dp_rank is None else None
    return prediction_of(lowered, cluster, simulation, places), simulation


def prediction_of(
    lowered: Lowered, cluster: Cluster, simulation: Simulation, places: Sequence[int] | None = None
) -> Prediction:
    """What a simulated step says of a plan; `places` are those of one dp rank among all that were
    simulated, otherwise these are all.
    """
    places = range(lowered.plan.pp) if places is None else places
    moves, updates = bool(lowered.plan.host_activations), _host_updates(lowered, cluster)
    return Prediction(
        simulation.step_s,
        simulation.bubble_share,
        tuple(simulation.peak_bytes[k] for k in places),
        tuple(simulation.exposed_s[k] for k in places),
        lowered.gains or (),
        host_s=tuple(sum(u.update_s + u.up_s for u in own.values()) for own in updates),
        host_left_s=_host_left(updates, simulation, lowered.plan.mesh)
        if simulation.collectives
        else (),
        host_bytes=tuple(simulation.host_bytes[k] for k in places) if moves else (),
    )


def cost_table(
    lowered: Lowered,
    cluster: Cluster,
    costs: tuple[StageCost, ...],
    messages: tuple[float, float] | None = None,
) -> CostTable:
    """What the actions of a plan's Programs cost on a cluster, by the costs of its stages; for
    `messages` see `predict`. Where the cores that compute carry these, each costs its latency at
    both of its ends.
    """
    plan, local = lowered.plan, lowered.stages.local
    mesh = plan.mesh
    links = pipeline_links(mesh, cluster)
    near = Link(*messages) if messages else links.near
    beside = (cluster.sharing or cluster.described(mesh.world_size)).beside(mesh.world_size)
    by_cores = mesh_fabric(mesh, cluster).by_cores
    handled_s = (1.0 - beside) * near.latency_s if by_cores else 0.0
    there, back = _handled(lowered)
    return CostTable(
        tuple(
            with_messages(
                replace(cost, reduce_s=tied_seconds(tied_bytes(plan, graph, stage), mesh, cluster)),
                there[stage] * handled_s,
                back[stage] * handled_s,
            )
            for stage, (cost, graph) in enumerate(zip(costs, local, strict=True))
        ),
        *near,
        collective_s=_collective_seconds(lowered, cluster),
        overlap=beside,
        copied=_copied(lowered, cluster),
        sharing=cluster.sharing,
        ranks=mesh.world_size,
        far=links.far,
        crossing=links.crossing,
        mesh=mesh,
    )


def _handled(lowered: Lowered) -> tuple[Counter[int], Counter[int]]:
    """The messages that each stage sends and receives for a micro-batch: values, and gradients."""
    there, back = Counter[int](), Counter[int]()
    rank_of = lowered.plan.rank_of
    for t in lowered.stages.transfers:
        ends = t.source_stage, t.target_stage
        if rank_of[ends[0]] != rank_of[ends[1]]:
            there.update(ends)
            back.update(ends if t.grad else ())
    return there, back


def _host_updates(lowered: Lowered, cluster: Cluster) -> list[dict[str, HostUpdate]]:
    """Of each pipeline rank the buckets that its host updates; none where no rank's does."""
    plan, host = lowered.plan, cluster.host
    if not plan.host_states or host is None:
        return []
    found: list[dict[str, HostUpdate]] = [{} for _ in range(plan.pp)]
    for own, buckets in zip(found, lowered.buckets, strict=True):
        for spec in buckets:
            if spec.on_host:
                kept = spec.dtype.itemsize
                computed = plan.precision.dtype("compute") if plan.precision else spec.dtype
                up_bytes = 0 if spec.fetched else computed.itemsize  # comes as it is read
                sizes = Precision(up_bytes, kept, (OPTIMIZER_STATES + 1) * kept)
                own[spec.name] = host_update(-(-spec.numel // spec.shards.optimizer), sizes, host)
    return found


def _host_left(
    updates: Sequence[Mapping[str, HostUpdate]], simulation: Simulation, mesh: Mesh
) -> tuple[float, ...]:
    """Of each pipeline rank what is left behind a step where updates run in the backward."""
    ends: dict[tuple[int, str], float] = {}
    for event in simulation.collectives:
        key = mesh.coordinates(event.rank)[1], event.label
        ends[key] = max(event.end_s, ends.get(key, 0.0))
    found = []
    for rank, own in enumerate(updates):
        at = (
            (ends.get((rank, f"{CollectiveKind.REDUCE} {n}"), simulation.step_s), u)
            for n, u in own.items()
        )
        found.append(left_seconds(at, simulation.step_s))
    return tuple(found)


def _copied(lowered: Lowered, cluster: Cluster) -> frozenset[tuple[str, CollectiveKind]]:
    """What nothing but a copy does, by engines of its own: bringing buckets that are fetched whole,
    and gradients to the host that no other rank has; but by cores that compute, too.
    """
    plan, found = lowered.plan, set[tuple[str, CollectiveKind]]()
    if mesh_fabric(plan.mesh, cluster).by_cores:
        return frozenset()
    for bucket in (b for own in lowered.buckets for b in own):
        if bucket.fetched and bucket.shards.parameters == 1:
            found.add((bucket.name, CollectiveKind.GATHER))
        if bucket.on_host and plan.state_ranks == 1:
            found.add((bucket.name, CollectiveKind.REDUCE))
    return frozenset(found)


def _collective_seconds(
    lowered: Lowered, cluster: Cluster
) -> dict[tuple[str, CollectiveKind], float]:
    """Seconds of gathering and reducing the buckets of all pipeline ranks."""
    found: dict[tuple[str, CollectiveKind], float] = {}
    plan = lowered.plan
    group = dp_group(plan.mesh, cluster)
    host = cluster.with_hardware(plan.mesh.world_size).host
    for buckets in lowered.buckets if plan.has_collectives else ():
        found |= bucket_seconds(buckets, group, plan.precision, host)
    return found


def planned_costs(lowered: Lowered, cluster: Cluster) -> tuple[StageCost, ...]:
    """Costs of the stages' own graphs, less the communication that is to run under computation."""
    plan = lowered.plan
    cluster = cluster.with_hardware(plan.mesh.world_size)
    devices = stage_devices(cluster, plan.mesh, plan.rank_of)
    places = [place_on(cluster, plan.tp, device, cp=plan.cp) for device in devices]
    costs = graph_costs(lowered, places)
    gains = overlap_gains(lowered) or (0.0,) * len(costs)
    found = [faster(cost, 1 - gain) for cost, gain in zip(costs, gains, strict=True)]
    head, at = lowered.loss.head, lowered.head_stage
    if head is not None and at is not None:
        layout, chunk = even_layout(plan.mesh, plan.micro_batches), head.graph.told(called_pieces)
        found[at] = with_head(
            found[at], head, chunk, layout, plan.mesh, cluster, device=devices[at]
        )
    return tuple(found)


def tied_bytes(plan: Plan, local: Graph, stage: int) -> dict[int, int]:
    """Bytes of the gradients that a rank adds up for this stage, by the ranks that share them.

    Where there are several dp ranks, that is what it optimizes of them, reduced already.
    """
    found: Counter[int] = Counter()
    for item in local.inputs:
        if item.kind is InputKind.PARAMETER and item.requires_grad:
            stages = plan.parameters[item.target]
            ranks = {plan.rank_of[s] for s in stages}
            mine = min(s for s in stages if plan.rank_of[s] == plan.rank_of[stage])
            if len(ranks) > 1 and stage == mine:
                numel, kept = item.spec.numel, item.spec.dtype.itemsize
                if plan.has_buckets:
                    numel = -(-numel // plan.shards(stages[0]).optimizer)
                    kept = max(kept, 4)  # float32 at least
                found[len(ranks)] += numel * kept
    return dict(found)
