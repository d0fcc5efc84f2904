"""What users ask for, and the plan in full of one layout: its memory, its order of work."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from merakc.costs.ranks import fits, rank_memory_bytes
from merakc.costs.stage import faster, with_state
from merakc.costs.work.keep import keep_bytes, with_kept
from merakc.errors import ConfigError, MerakError
from merakc.files.reading import read_text
from merakc.frontend.record import Recording
from merakc.ir.batches import WHOLE_BATCH, BatchDims, Couplings
from merakc.ir.costs import StageCost
from merakc.ir.plan import Plan
from merakc.ir.plan_file import Prediction
from merakc.ir.precision import Precision
from merakc.ir.program import ActionKind, Inner, Mesh
from merakc.ir.recompute import IN_BACKWARD, parse_budget
from merakc.ir.state import (
    AUTO,
    UNSHARDED,
    ShardsGiven,
    StateShards,
    coarse_lattice,
    lattice,
    parse_shards,
)
from merakc.lowering.lowered import Lowered, make_plan
from merakc.lowering.overlap import choose_overlap, overlap_place
from merakc.lowering.predict import planned_costs, predict
from merakc.machines.cluster import Cluster
from merakc.passes.overlap.async_collectives import least_share
from merakc.passes.programs.collectives import rough_touches
from merakc.planner.budget import within_budget
from merakc.schedules.bound import lower_bound_s
from merakc.schedules.generate import generate
from merakc.schedules.registry import NAMES
from merakc.schedules.text import format_schedule, parse_schedule
from merakc.schedules.timing import Pipeline, make_pipeline

# Micro-batches a stage beyond which the pipeline's bubble is small: (p - 1) / (m + p - 1) < 20 %.
MICRO_BATCHES_PER_STAGE = 4
ACTION = re.compile(r"\b\d+[FBIWR]\d+\b")
# Works that the generator schedules: about a second.
EFFORT = 100_000
# What keeps no more bytes than 1F1B, but for so many, is looked for among fewer orders, the known
# schedules first.
SAME = 1.01
LEAN_EFFORT = 20_000
# The most dp ranks whose whole lattice of shards is tried.
FINE = 8
# The recording of a micro-batch of so many samples.
Record = Callable[[int], Recording]
# Schedules that are made for recomputation.
ALWAYS_RECOMPUTES = ("merak",)


@dataclass(frozen=True, slots=True)
class Request:
    """What the user fixed; None is open. `batch_size` is one dp rank's.

    `order` is an order of work of the user's own, which `schedule` then names.
    """

    world_size: int
    batch_size: int
    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    micro_batches: int | None = None
    schedule: str = "auto"
    order: tuple[str, ...] = ()  # of work, a text for each pipeline rank
    recompute: str = "auto"
    sequence_parallel: bool | None = None
    state_shards: ShardsGiven | None = None
    precision: Precision | None = None
    overlap: int | None = None  # parts of a micro-batch; 0 for collectives that block
    chunks: int | None = None  # stages a pipeline rank, of schedules that leave a choice
    couplings: Couplings = WHOLE_BATCH  # of the samples that the loss couples
    batch_dims: BatchDims = field(default_factory=dict)  # where samples stand in the batch
    inner: Inner = "pp"  # the axis of ranks that are closer, after those of tp
    total_batch_size: int | None = None  # over all dp ranks; `batch_size` then follows from dp

    def local_batch_size(self, dp: int) -> int | None:
        """Samples of each of `dp` ranks; None where their batch does not divide."""
        if self.total_batch_size is None:
            return self.batch_size
        each, left = divmod(self.total_batch_size, dp)
        return None if left else each


def with_schedule(request: Request) -> Request:
    """The request with its schedule understood: a known name, or an order as text or in a file.

    Raises `ConfigError` for what is none of these and `ProgramError` for an order that cannot run.
    """
    text = request.schedule
    if text == "auto" or text in NAMES:
        return request
    name = "custom"
    if not ACTION.search(text):
        path = Path(text)
        if not path.is_file():
            raise ConfigError(
                f"schedule {text!r} is not known, and no file; choose one of auto, "
                f"{', '.join(NAMES)}, or give an order of work such as '0F0 0B0; 1F0 1B0'"
            )
        try:
            text, name = read_text(path), path.stem
        except (OSError, ValueError) as error:
            raise ConfigError(f"schedule {text}: {error}; give a file of text") from error
    order = format_schedule(parse_schedule(text, name)).splitlines()
    return replace(request, schedule=name, order=tuple(order))


def meshes(request: Request) -> list[Mesh]:
    """All meshes of the world that agree with the request. Raises `ConfigError` if none does."""
    fixed = {"dp": request.dp, "tp": request.tp, "pp": request.pp}
    for name, value in fixed.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; a degree is at least 1")
    found = [
        Mesh(dp, tp, pp, request.inner)
        for dp, tp, pp in _factorisations(request.world_size)
        if all(v is None or v == g for v, g in zip(fixed.values(), (dp, tp, pp), strict=True))
    ]
    if not found:
        given = " x ".join(f"{k}={v}" for k, v in fixed.items() if v is not None)
        raise ConfigError(
            f"{given} does not multiply to the {request.world_size} ranks that were started; "
            "give degrees whose product is the number of ranks, or leave one of them None"
        )
    return found


def micro_batches_for(request: Request, mesh: Mesh) -> int:
    """The user's number of micro-batches, or the divisor of the batch nearest 4 a stage."""
    if request.micro_batches is not None:
        if request.micro_batches < 1 or request.batch_size % request.micro_batches:
            raise ConfigError(
                f"a batch of {request.batch_size} samples does not divide into "
                f"{request.micro_batches} micro-batches"
            )
        return request.micro_batches
    if mesh.pp == 1:
        return 1
    divisors = [d for d in range(1, request.batch_size + 1) if request.batch_size % d == 0]
    wanted = MICRO_BATCHES_PER_STAGE * mesh.pp
    return min(divisors, key=lambda d: (abs(d - wanted), -d))


def plan_layout(request: Request, record: Record, cluster: Cluster) -> Lowered:
    """The plan of a request that leaves no degree open, with what suits its memory best.

    Collectives block, and the order of work is 1F1B's, where the request leaves these open:
    `improve` looks for better. Raises `MerakError`s of what cannot be planned.
    """
    (mesh,) = meshes(request)
    micro_batches = micro_batches_for(request, mesh)
    recording = record(request.batch_size // micro_batches)
    schedule = "1f1b" if request.schedule == "auto" else request.schedule
    choices = _recomputations(request)
    lowered = make_plan(
        recording, mesh, micro_batches, cluster, batch_size=request.batch_size,
        schedule=schedule, order=request.order, virtual_stages=request.chunks, recompute=choices[0],
        sequence_parallel=bool(request.sequence_parallel),
    )  # fmt: skip
    plan, asked = lowered.plan, request.state_shards
    if asked is not None and asked != AUTO:
        plan = _sharded(plan, parse_shards(asked, mesh.dp, len(plan.rank_of)))
    plan = replace(plan, precision=request.precision)
    made: list[Lowered] = []
    for choice in choices:
        lowered = _recomputing(replace(lowered, plan=plan), choice, request, cluster)
        plan, suffices = lowered.plan, _fits(lowered, cluster)
        if mesh.dp > 1 and (asked == AUTO or (asked is None and not suffices)):
            lowered = _with_fastest_shards(lowered, cluster)
            plan = lowered.plan
        made.append(lowered)
        # Ranks that share cores may be faster where one of them has more to do.
        if _fits(lowered, cluster) and cluster.sharing is None:
            break
    fitting = [one for one in made if _fits(one, cluster)]
    return min(fitting or made[-1:], key=lambda one: standing(one, cluster))


def improve(request: Request, lowered: Lowered, record: Record, cluster: Cluster) -> Lowered:
    """The same with other shards of the state, with communication under computation, and with an
    order of work made for it, where the request leaves them open and they pay.

    Raises `MerakError` where what is asked for cannot be.
    """
    if lowered.plan.dp > 1 and request.state_shards in (None, AUTO):
        sharded = _with_fastest_shards(lowered, cluster)
        lowered = min(lowered, sharded, key=lambda one: standing(one, cluster))
    samples, asked = lowered.plan.batch_size, request.overlap
    try:
        found = choose_overlap(lowered, lambda parts: record(samples // parts), cluster, asked)
    except MerakError:
        if request.overlap is not None:
            raise
        found = lowered
    if found is not lowered:
        found = _with_prediction(found, cluster)
        if request.overlap is None and standing(lowered, cluster) <= standing(found, cluster):
            found = lowered
    return _generated(request, found, cluster)


def least_seconds(lowered: Lowered, cluster: Cluster) -> float:
    """Seconds of a step that no order of work, and no communication under computation, can beat."""
    plan, place = lowered.plan, overlap_place(cluster, lowered.plan.tp)
    costs = planned_costs(lowered, cluster)
    if plan.tp > 1:
        stages = zip(costs, lowered.stages.local, strict=True)
        costs = tuple(faster(cost, least_share(local, place)) for cost, local in stages)
    pipeline = _pipeline(lowered, costs, cluster)
    return lower_bound_s(pipeline, rank_memory_bytes(cluster, plan.mesh))


def _pipeline(lowered: Lowered, costs: Sequence[StageCost], cluster: Cluster) -> Pipeline:
    sizes = [t.size_bytes for t in lowered.stages.transfers]
    link_s = cluster.link_latency_s + max(sizes, default=0) / cluster.link_bytes_per_s
    head_s = None if lowered.head_stage is None else costs[lowered.head_stage].head_s
    return make_pipeline(lowered.plan.rank_of, costs, lowered.plan.micro_batches, link_s, head_s)


def standing(lowered: Lowered, cluster: Cluster) -> tuple[bool, float, int]:
    """Plans that fit come first, then the faster ones per sample, then those of less memory."""
    plan, prediction = lowered.plan, _predicted(lowered)
    sample_s = float(f"{prediction.step_s / (plan.dp * plan.batch_size):.9e}")
    return not _fits(lowered, cluster), sample_s, max(prediction.peak_bytes)


def _fits(lowered: Lowered, cluster: Cluster) -> bool:
    return fits(_predicted(lowered).peak_bytes, cluster, lowered.plan.mesh)


def _with_prediction(lowered: Lowered, cluster: Cluster) -> Lowered:
    prediction, _ = predict(lowered, cluster, dp_rank=0)
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
    if request.schedule != "auto" or plan.pp == 1 or request.recompute not in ("auto", "none"):
        return lowered
    costs = planned_costs(lowered, cluster)
    # Where recomputing gives nothing back, no order recomputes.
    keeping = tuple(replace(c, checkpoint_bytes=c.saved_bytes) for c in costs)
    in_backward = plan.recompute in IN_BACKWARD
    costs = keeping if request.recompute == "none" or in_backward else costs
    memory_bytes = rank_memory_bytes(cluster, plan.mesh)
    found = _ordered(lowered, costs, cluster, memory_bytes, EFFORT)
    if found is None or standing(found, cluster) >= standing(lowered, cluster):
        return lowered
    best = _predicted(found)
    least_bytes = round(SAME * max(_predicted(lowered).peak_bytes))
    if plan.recompute == "none" and max(best.peak_bytes) > least_bytes:
        memory_bytes = tuple(min(own, least_bytes) for own in memory_bytes)
        lean = _ordered(lowered, keeping, cluster, memory_bytes, LEAN_EFFORT)
        if lean is not None:
            found = min(found, lean, key=lambda one: standing(one, cluster))
    return found


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


def _with_fastest_shards(lowered: Lowered, cluster: Cluster) -> Lowered:
    """The plan with the shards of each stage with which its rank waits least for dp, of those that
    fit.

    Every point of the lattice is simulated once, on all ranks alike: what a rank waits for follows
    from its own stages. Among equals the least is communicated, then the least sharded. Where
    nothing fits a rank, what takes the fewest bytes.
    """
    plan, local = lowered.plan, lowered.stages.local
    touches = {s: graph.told(rough_touches) for s, graph in enumerate(local)}
    costs = planned_costs(lowered, cluster)
    costs = tuple(map(with_kept, costs, plan.keep_bytes)) if plan.keep_bytes else costs
    memory_bytes = rank_memory_bytes(cluster, plan.mesh)
    keys: list[dict[StateShards, tuple[object, ...]]] = [{} for _ in range(plan.pp)]
    inside = cluster.described(plan.mesh.world_size).nodes[0].devices // plan.mesh.dp_stride
    for shards in lattice(plan.dp) if plan.dp <= FINE else coarse_lattice(plan.dp, inside):
        tried = replace(lowered, plan=replace(plan, state_shards=(shards,) * len(plan.rank_of)))
        own = tuple(
            with_state(cost, graph, shards, plan.precision)
            for cost, graph in zip(costs, local, strict=True)
        )
        found, simulation = predict(tried, cluster, own, touches, dp_rank=0)
        for rank, peak_bytes in enumerate(found.peak_bytes):
            lacking = max(peak_bytes - memory_bytes[rank], 0)
            waits = round(found.exposed_s[rank], 9)
            keys[rank][shards] = lacking, waits, simulation.communication_s[rank], shards
    best = [min(of_rank, key=of_rank.__getitem__) for of_rank in keys]
    chosen = tuple(best[rank] for rank in plan.rank_of)
    return _with_prediction(replace(lowered, plan=_sharded(plan, chosen)), cluster)


def _sharded(plan: Plan, shards: tuple[StateShards, ...]) -> Plan:
    return replace(plan, state_shards=() if set(shards) == {UNSHARDED} else shards)


def _recomputing(lowered: Lowered, choice: str, request: Request, cluster: Cluster) -> Lowered:
    """The plan that recomputes so, with its prediction. Raises `ConfigError` where a budget that is
    asked for cannot be kept.
    """
    plan = replace(lowered.plan, recompute=choice, keep_bytes=(), kept_blocks=())
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
    return (
        ("stage",)
        if request.schedule in ALWAYS_RECOMPUTES
        else ("none", "budget", "solved", "stage")
    )


def _factorisations(world: int) -> Iterator[tuple[int, int, int]]:
    for dp in range(1, world + 1):
        if world % dp == 0:
            for tp in range(1, world // dp + 1):
                if world // dp % tp == 0:
                    yield dp, tp, world // dp // tp
