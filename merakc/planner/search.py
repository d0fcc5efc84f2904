"""The plan in full of one strategy: its memory, its order of work, what it hides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from merakc.analysis.buckets import WORTH_SHARE
from merakc.costs.pipeline_links import pipeline_links
from merakc.costs.ranks import fits, rank_memory_bytes
from merakc.costs.stage import faster
from merakc.costs.work.keep import keep_bytes
from merakc.errors import ConfigError, MerakError
from merakc.frontend.record import Recording
from merakc.ir.costs import StageCost
from merakc.ir.offload import ACTIVATIONS, NONE, parse_offload
from merakc.ir.plan import Plan
from merakc.ir.plan_file import Prediction
from merakc.ir.program import ActionKind
from merakc.ir.recompute import IN_BACKWARD, parse_budget
from merakc.ir.state import (
    AUTO,
    UNSHARDED,
    StateShards,
    coarse_lattice,
    parse_shards,
)
from merakc.ir.strategy import Strategy
from merakc.lowering.lowered import Lowered, make_plan
from merakc.lowering.overlap import choose_overlap, overlap_place
from merakc.lowering.predict import planned_costs
from merakc.lowering.state_shards import Way, choose_shards
from merakc.lowering.try_out import try_out
from merakc.machines.cluster import Cluster
from merakc.passes.overlap.async_collectives import least_share
from merakc.planner.budget import within_budget
from merakc.planner.host_state import all_on_host, with_host_states
from merakc.planner.offload import with_moves
from merakc.planner.request import Request, meshes, micro_batches_for
from merakc.schedules.bound import lower_bound_s
from merakc.schedules.generate import generate
from merakc.schedules.text import format_schedule, parse_schedule
from merakc.schedules.timing import Pipeline, make_pipeline

# Works that the generator schedules: about a second.
EFFORT = 100_000
# What keeps no more bytes than 1F1B, but for so many, is looked for among fewer orders, the known
# schedules first.
SAME = 1.01
LEAN_EFFORT = 20_000
# The recording of a micro-batch of so many samples.
Record = Callable[[int], Recording]
# Schedules that are made for recomputation.
ALWAYS_RECOMPUTES = ("merak",)


def plan_layout(request: Request, record: Record, cluster: Cluster) -> Lowered:
    """The plan of a request that leaves no degree open, with what suits its memory best.

    Collectives block, and the order of work is 1F1B's, where the request leaves these open:
    `improve` looks for better. Raises `MerakError`s of what cannot be planned.
    """
    return with_memory(request, cut_layout(request, record, cluster), cluster)


def cut_layout(request: Request, record: Record, cluster: Cluster) -> Lowered:
    """The model split over tp and cut into stages, as a request that leaves no degree open says."""
    (mesh,) = meshes(request)
    strategy = Strategy().on(
        mesh, batch_size=request.batch_size, micro_batches=micro_batches_for(request, mesh),
        schedule="1f1b" if request.schedule == AUTO else request.schedule, order=request.order,
        chunks=request.chunks or 1, sequence_parallel=bool(request.sequence_parallel),
        expert_parallel=bool(request.expert_parallel), precision=request.precision,
        expert_load=request.expert_load if request.expert_parallel else (),
    )  # fmt: skip
    lowered, asked = make_plan(record(strategy.samples), strategy, cluster), request.state_shards
    if asked is None or asked == AUTO:
        return lowered
    plan = lowered.plan
    shards = parse_shards(asked, plan.state_ranks, len(plan.rank_of))
    return replace(lowered, plan=_sharded(plan, shards))


def with_memory(request: Request, lowered: Lowered, cluster: Cluster) -> Lowered:
    """The fastest that fits of what may be recomputed and, if need be, sharded; what needs least
    where nothing fits. More is recomputed, or waits on the host as needed, only where less does not
    fit, except by ranks that share cores: they may be faster where one of them has more to do.

    Raises `FitError` where a budget that is asked for cannot be kept.
    """
    asked, made = request.state_shards, list[Lowered]()
    offload = parse_offload(request.offload)
    for choice in _recomputations(request):
        lowered = _recomputing(lowered, choice, request, cluster)
        is_open = asked == AUTO or (asked is None and not _fits(lowered, cluster))
        if offload.moves_parameters and asked in (None, AUTO):
            lowered = _sharded_to_fetch(lowered, request.offload, cluster)
            is_open = False
        if lowered.plan.state_ranks > 1 and (is_open or _waits(lowered)):
            lowered = _with_fastest_shards(lowered, cluster, are_open=is_open)
        moved = all_on_host(lowered, request.offload, cluster) if choice == "budget" else None
        if moved is not None:  # less is made again then
            made.append(within_budget(moved, cluster, parse_budget(request.recompute)))
        lowered = with_host_states(lowered, request.offload, cluster)
        made.append(with_moves(lowered, request.offload, cluster))
        # What fits by the host alone is held against what fits by recomputation.
        plan = made[-1].plan
        alone = offload.as_needed and bool(plan.host_states or plan.host_activations)
        if _fits(made[-1], cluster) and cluster.sharing is None and not alone:
            break
    fitting = [one for one in made if _fits(one, cluster)]
    if not fitting:
        return min(made, key=lambda one: _lacking_bytes(one, cluster))
    return min(fitting, key=lambda one: standing(one, cluster))


def is_pressed(request: Request, lowered: Lowered, cluster: Cluster) -> bool:
    """Whether a plan fits the memory only by what costs time and the request leaves open: work done
    again, state that is sharded, or what waits on the host.
    """
    plan = bare = lowered.plan
    if request.recompute == "auto":
        bare = replace(bare, recompute="none", keep_bytes=(), kept_blocks=())
    if parse_offload(request.offload).as_needed:
        bare = replace(bare, offload=NONE, host_states=(), host_parameters=(), host_activations=())
    if request.state_shards in (None, AUTO):
        bare = replace(bare, state_shards=())
    return bare != plan and not _fits(
        _with_prediction(replace(lowered, plan=bare), cluster), cluster
    )


def improve(
    request: Request,
    lowered: Lowered,
    record: Record,
    cluster: Cluster,
    best: Lowered | None = None,
) -> Lowered:
    """The same with other shards of the state, with communication under computation, and with an
    order of work made for it, where the request leaves them open and they pay: enough to be faster
    than the `best` so far, if there is one.

    Raises `MerakError` where what is asked for cannot be.
    """
    before = lowered.plan
    is_open = request.state_shards in (None, AUTO) and not before.host_parameters
    if before.state_ranks > 1 and is_open:
        sharded = _with_fastest_shards(lowered, cluster)
        lowered = min(lowered, sharded, key=lambda one: standing(one, cluster))
    samples, asked = lowered.plan.batch_size, request.overlap
    if best is not None and asked is None and _is_behind(request, lowered, cluster, best):
        return lowered
    try:
        hidden = choose_overlap(lowered, lambda parts: record(samples // parts), cluster, asked)
    except MerakError:
        if request.overlap is not None:
            raise
        hidden = lowered
    if hidden is not lowered:
        hidden = _with_prediction(hidden, cluster)
        if request.overlap is None and standing(lowered, cluster) <= standing(hidden, cluster):
            hidden = lowered
    made = _generated(request, hidden, cluster)
    if made is hidden or before.state_shards == hidden.plan.state_shards:
        return made
    # An order that is made for other shards may hide more of what these wait for.
    other = replace(hidden, plan=replace(hidden.plan, state_shards=before.state_shards))
    other = _generated(request, _with_prediction(other, cluster), cluster)
    return min(made, other, key=lambda one: standing(one, cluster))


def least_seconds(lowered: Lowered, cluster: Cluster) -> float:
    """Seconds of a step that no order of work, and no communication under computation, can beat."""
    pipeline = _pipeline(lowered, _least_costs(lowered, cluster), cluster)
    return lower_bound_s(pipeline, rank_memory_bytes(cluster, lowered.plan.mesh))


def can_beat(least_s: float, lowered: Lowered, best: Lowered, cluster: Cluster) -> bool:
    """Whether a plan whose step takes `least_s` at the least may stand before the best."""
    return (False, least_s / lowered.plan.total_batch_size, 0) < standing(best, cluster)


def _is_behind(request: Request, lowered: Lowered, cluster: Cluster, best: Lowered) -> bool:
    """Whether the plan stays behind the best with all communication of tp hidden, which its order
    of work does not wait less for: a step takes no longer where its computes take less, but where
    ranks share cores.
    """
    if _order_is_open(request, lowered.plan) or cluster.sharing is not None:
        return False
    costs = _least_costs(lowered, cluster)
    least, _ = try_out(lowered, cluster, costs)
    return not can_beat(least.step_s, lowered, best, cluster)


def _least_costs(lowered: Lowered, cluster: Cluster) -> tuple[StageCost, ...]:
    """Those of the stages with all communication of tp and cp hidden."""
    costs, plan = planned_costs(lowered, cluster), lowered.plan
    if plan.lanes == 1:
        return costs
    place = overlap_place(cluster, plan.tp, plan.cp)
    shares = (local.told(least_share, place) for local in lowered.stages.local)
    return tuple(map(faster, costs, shares))


def _pipeline(lowered: Lowered, costs: Sequence[StageCost], cluster: Cluster) -> Pipeline:
    size_bytes = max((t.size_bytes for t in lowered.stages.transfers), default=0)
    links = pipeline_links(lowered.plan.mesh, cluster)
    link_s = [links.between(*pair).seconds(size_bytes) for pair in pairwise(lowered.plan.rank_of)]
    head_s = None if lowered.head_stage is None else costs[lowered.head_stage].head_s
    return make_pipeline(lowered.plan.rank_of, costs, lowered.plan.micro_batches, link_s, head_s)


def standing(lowered: Lowered, cluster: Cluster) -> tuple[bool, float, int]:
    """Plans that fit come first, then the faster ones per sample, then those of less memory."""
    plan, prediction = lowered.plan, _predicted(lowered)
    step_s = prediction.step_s + max(prediction.host_s, default=0.0)
    sample_s = float(f"{step_s / (plan.dp * plan.batch_size):.9e}")
    return not _fits(lowered, cluster), sample_s, max(prediction.peak_bytes)


def _waits(lowered: Lowered) -> bool:
    """Whether a rank waits so long for state that is sharded that larger buckets are tried."""
    prediction = _predicted(lowered)
    is_sharded = any(shards.optimizer > 1 for shards in lowered.plan.state_shards)
    return is_sharded and max(prediction.exposed_s) > WORTH_SHARE * prediction.step_s


def _fits(lowered: Lowered, cluster: Cluster) -> bool:
    return fits(_predicted(lowered).peak_bytes, cluster, lowered.plan.mesh)


def _lacking_bytes(lowered: Lowered, cluster: Cluster) -> int:
    """What the rank lacks that lacks most."""
    memory_bytes = rank_memory_bytes(cluster, lowered.plan.mesh)
    peaks = _predicted(lowered).peak_bytes
    return max(need - have for need, have in zip(peaks, memory_bytes, strict=True))


def _with_prediction(lowered: Lowered, cluster: Cluster) -> Lowered:
    prediction, _ = try_out(lowered, cluster)
    return replace(lowered, prediction=prediction)


def _predicted(lowered: Lowered) -> Prediction:
    assert lowered.prediction is not None
    return lowered.prediction


def _generated(request: Request, lowered: Lowered, cluster: Cluster) -> Lowered:
    """The plan with an order of work made for its stages and memory, where that is shorter.

    Of orders that are equally short, the one that keeps no more than 1F1B. Only where schedule and
    recomputation are open; "none" is open too, as to the order.
    """
    plan = lowered.plan
    if not _order_is_open(request, plan):
        return lowered
    costs = planned_costs(lowered, cluster)
    # Where recomputing gives nothing back, no order recomputes.
    keeping = tuple(replace(c, checkpoint_bytes=c.saved_bytes) for c in costs)
    in_graphs = plan.recompute in IN_BACKWARD or plan.host_activations
    costs = keeping if request.recompute == "none" or in_graphs else costs
    memory_bytes = rank_memory_bytes(cluster, plan.mesh)
    ordered = _ordered(lowered, costs, cluster, memory_bytes, EFFORT)
    if ordered is None or standing(ordered, cluster) >= standing(lowered, cluster):
        return lowered
    best = _predicted(ordered)
    least_bytes = round(SAME * max(_predicted(lowered).peak_bytes))
    if plan.recompute == "none" and max(best.peak_bytes) > least_bytes:
        memory_bytes = tuple(min(most, least_bytes) for most in memory_bytes)
        lean = _ordered(lowered, keeping, cluster, memory_bytes, LEAN_EFFORT)
        if lean is not None:
            ordered = min(ordered, lean, key=lambda one: standing(one, cluster))
    return ordered


def _order_is_open(request: Request, plan: Plan) -> bool:
    """Whether an order of work may be made."""
    return request.makes_orders and plan.pp > 1


def _ordered(
    lowered: Lowered, costs: Sequence[StageCost], cluster: Cluster, memory_bytes: Sequence[int],
    effort: int,
) -> Lowered | None:  # fmt: skip
    """The plan with an order that is generated for these costs of its stages and this memory; None
    where nothing fits it.
    """
    plan, pipeline = lowered.plan, _pipeline(lowered, costs, cluster)
    try:
        schedule = generate([pipeline], memory_bytes, effort=effort).schedule
    except ConfigError:
        return None
    kinds = {a.kind for order in schedule.orders for a in order}
    kept_recompute = plan.recompute if plan.recompute in IN_BACKWARD else "none"
    made = replace(
        plan,
        schedule="auto",
        order=tuple(format_schedule(schedule).splitlines()),
        recompute="stage" if ActionKind.RECOMPUTE in kinds else kept_recompute,
        keep_bytes=(),
    )
    return _with_prediction(replace(lowered, plan=made), cluster)


def _with_fastest_shards(lowered: Lowered, cluster: Cluster, *, are_open: bool = True) -> Lowered:
    """The plan with the shards of `choose_shards`: each stage's own, or all the same where that is
    faster.
    """
    chosen = choose_shards(lowered, cluster, are_open=are_open)
    made = _with_shards(lowered, chosen.each, cluster)
    if chosen.same_s >= _predicted(made).step_s:
        return made
    same = _with_shards(lowered, chosen.same, cluster)
    return min(made, same, key=lambda one: standing(one, cluster))


def _sharded_to_fetch(lowered: Lowered, offload: str, cluster: Cluster) -> Lowered:
    """The plan with the shards with which its parameters come from the host the fastest: whole
    ones, those of a node, or all.
    """
    mesh = lowered.plan.mesh
    inside = cluster.described(mesh.world_size).nodes[0].devices // mesh.state_stride
    ways = [s for s in coarse_lattice(mesh.state_ranks, inside) if s.updates_what_it_keeps]
    stages = len(lowered.plan.rank_of)
    made = [_with_shards(lowered, (way,) * stages, cluster) for way in ways]
    return min(made, key=lambda m: standing(with_host_states(m, offload, cluster), cluster))


def _with_shards(lowered: Lowered, shards: Way, cluster: Cluster) -> Lowered:
    return _with_prediction(replace(lowered, plan=_sharded(lowered.plan, shards)), cluster)


def _sharded(plan: Plan, shards: tuple[StateShards, ...]) -> Plan:
    return replace(plan, state_shards=() if set(shards) == {UNSHARDED} else shards)


def _recomputing(lowered: Lowered, choice: str, request: Request, cluster: Cluster) -> Lowered:
    """The plan that recomputes so, with its prediction. Raises `FitError` where a budget that is
    asked for cannot be kept.
    """
    plan = replace(
        lowered.plan,
        recompute=choice,
        keep_bytes=(),
        kept_blocks=(),
        offload=NONE,
        host_states=(),
        host_parameters=(),
    )
    if choice == "budget":
        budget = parse_budget(request.recompute)
        return within_budget(replace(lowered, plan=plan), cluster, budget)
    if choice == "solved":
        plan = replace(plan, keep_bytes=_kept(replace(lowered, plan=plan), cluster))
    return _with_prediction(replace(lowered, plan=plan), cluster)


def _kept(lowered: Lowered, cluster: Cluster) -> tuple[int, ...]:
    """What each stage may keep of a micro-batch in the cluster's memory."""
    costs = planned_costs(lowered, cluster)
    return keep_bytes(lowered.schedule, costs, rank_memory_bytes(cluster, lowered.plan.mesh))


def _recomputations(request: Request) -> tuple[str, ...]:
    """What to try until the memory suffices."""
    if request.recompute != "auto":
        return ("budget",) if parse_budget(request.recompute) else (request.recompute,)
    if request.order:
        orders = parse_schedule("\n".join(request.order)).orders
        kinds = {a.kind for order in orders for a in order}
        return ("stage",) if ActionKind.RECOMPUTE in kinds else ("none",)
    if request.schedule in ALWAYS_RECOMPUTES:
        return ("stage",)
    offload = parse_offload(request.offload)
    if offload.may(ACTIVATIONS) and not offload.as_needed:
        return "none", "budget"
    return "none", "budget", "solved", "stage"
