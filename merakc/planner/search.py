"""Chooses what the user left open: degrees, micro-batches, schedule, recomputation."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from merakc.costs.ranks import fits, rank_memory_bytes
from merakc.costs.stage import with_state
from merakc.costs.work.keep import keep_bytes, with_kept
from merakc.errors import ConfigError, MerakError
from merakc.frontend.record import Recording
from merakc.ir.batches import WHOLE_BATCH, BatchDims, Couplings
from merakc.ir.costs import StageCost
from merakc.ir.plan import Plan, Prediction
from merakc.ir.precision import Precision
from merakc.ir.program import ActionKind, Inner, Mesh
from merakc.ir.state import AUTO, ShardsGiven, StateShards, lattice, parse_shards
from merakc.lowering.lowered import Lowered, make_plan
from merakc.lowering.overlap import choose_overlap
from merakc.lowering.predict import planned_costs, predict
from merakc.machines.cluster import Cluster
from merakc.passes.programs.collectives import rough_touches
from merakc.schedules.generate import generate
from merakc.schedules.registry import NAMES
from merakc.schedules.text import format_schedule, parse_schedule
from merakc.schedules.timing import make_pipeline

# Micro-batches a stage beyond which the pipeline's bubble is small: (p - 1) / (m + p - 1) < 20 %.
MICRO_BATCHES_PER_STAGE = 4
ACTION = re.compile(r"\b\d+[FBIWR]\d+\b")
# Works that the generator schedules: about a second.
EFFORT = 100_000
# Orders whose seconds or bytes are less than this apart are equal: predictions tell no more. What
# keeps no more than 1F1B is looked for among fewer, the known schedules first.
SAME = 1.01
LEAN_EFFORT = 20_000
# The best plans, of which each is tried with communication under computation: it takes seconds.
OVERLAPPED = 3
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
            text, name = path.read_text(encoding="utf-8"), path.stem
        except (OSError, UnicodeDecodeError) as error:
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


def search(
    request: Request, record: Callable[[int], Recording], cluster: Cluster
) -> tuple[Plan, Lowered]:
    """The fastest plan per sample that fits the memory, by simulation.

    `record` gives the recording for a number of micro-batches. Where the user fixed everything
    there is one candidate, taken even if it seems not to fit. Raises the first candidate's error
    where none is possible.
    """
    found: list[tuple[Plan, Lowered]] = []
    first_error: MerakError | None = None
    for mesh in meshes(request):
        for sequence_parallel in _forms(request, mesh):
            try:
                found.append(_plan(request, mesh, record, cluster, sequence_parallel))
            except MerakError as error:
                first_error = first_error or error
                break
        found = sorted(found, key=lambda made: _rank(made[0], cluster))[:OVERLAPPED]
    overlapped: list[tuple[Plan, Lowered]] = []
    for _, lowered in found:
        try:
            overlapped.append(_overlapped(request, lowered, record, cluster))
        except MerakError as error:
            first_error = first_error or error
    if not overlapped:
        assert first_error is not None
        raise first_error
    best = min(overlapped, key=lambda made: _rank(made[0], cluster))
    return _generated(request, *best, cluster)


def improve(
    request: Request,
    plan: Plan,
    lowered: Lowered,
    record: Callable[[int], Recording],
    cluster: Cluster,
) -> tuple[Plan, Lowered]:
    """A plan with communication under computation, and an order of work made for it, where the
    request leaves them open and they pay.
    """
    if request.overlap is None:
        with contextlib.suppress(MerakError):  # it need not
            found = _overlapped(request, lowered, record, cluster)
            if _rank(found[0], cluster) < _rank(plan, cluster):
                plan, lowered = found
    return _generated(request, plan, lowered, cluster)


def _rank(plan: Plan, cluster: Cluster) -> tuple[bool, float]:
    """Plans that fit come first, and then the faster ones per sample."""
    prediction = _predicted(plan)
    too_big = not fits(prediction.peak_bytes, cluster, plan.mesh)
    return too_big, prediction.step_s / plan.dp


def _predicted(plan: Plan) -> Prediction:
    assert plan.prediction is not None
    return plan.prediction


def _overlapped(
    request: Request, lowered: Lowered, record: Callable[[int], Recording], cluster: Cluster
) -> tuple[Plan, Lowered]:
    """The plan with communication under computation, where that is asked for or pays."""
    made = choose_overlap(lowered, record, cluster, request.overlap)
    if made is not lowered:
        prediction, _ = predict(made, cluster, dp_rank=0)
        made = replace(made, plan=replace(made.plan, prediction=prediction))
    return made.plan, made


def _generated(
    request: Request, plan: Plan, lowered: Lowered, cluster: Cluster
) -> tuple[Plan, Lowered]:
    """The plan with an order of work made for its stages and memory, where that is shorter.

    Of orders that are equally short, to within what predictions can tell, the one that keeps no
    more than 1F1B. Only where schedule and recomputation are open; "none" is open too, as to the
    order.
    """
    if request.schedule != "auto" or plan.pp == 1 or request.recompute not in ("auto", "none"):
        return plan, lowered
    costs = planned_costs(lowered, cluster)
    # Where recomputing gives nothing back, no order recomputes.
    keeping = tuple(replace(c, checkpoint_bytes=c.saved_bytes) for c in costs)
    costs = keeping if request.recompute == "none" else costs
    memory_bytes = rank_memory_bytes(cluster, plan.mesh)
    found = _ordered(lowered, costs, cluster, memory_bytes, EFFORT)
    if found is None or _rank(found, cluster) >= _rank(plan, cluster):
        return plan, lowered
    best = _predicted(found)
    least_bytes = round(SAME * max(_predicted(plan).peak_bytes))
    if plan.recompute == "none" and max(best.peak_bytes) > least_bytes:
        memory_bytes = tuple(min(own, least_bytes) for own in memory_bytes)
        lean = _ordered(lowered, keeping, cluster, memory_bytes, LEAN_EFFORT)
        if lean is not None and _predicted(lean).step_s <= SAME * best.step_s:
            found = lean
    return found, replace(lowered, plan=found)


def _ordered(
    lowered: Lowered, costs: Sequence[StageCost], cluster: Cluster, memory_bytes: Sequence[int],
    effort: int,
) -> Plan | None:  # fmt: skip
    """The plan with an order that is generated for these costs of its stages and this memory; None
    where nothing fits it.
    """
    plan = lowered.plan
    sizes = [t.size_bytes for t in lowered.stages.transfers]
    link_s = cluster.link_latency_s + max(sizes, default=0) / cluster.link_bytes_per_s
    head_s = None if lowered.head_stage is None else costs[lowered.head_stage].head_s
    pipeline = make_pipeline(plan.rank_of, costs, plan.micro_batches, link_s, head_s)
    try:
        schedule = generate([pipeline], memory_bytes, effort=effort).schedule
    except ConfigError:
        return None
    kinds = {a.kind for order in schedule.orders for a in order}
    made = replace(
        plan,
        schedule="auto",
        order=tuple(format_schedule(schedule).splitlines()),
        recompute="full" if ActionKind.RECOMPUTE in kinds else "none",
        keep_bytes=(),
    )
    prediction, _ = predict(replace(lowered, plan=made), cluster, dp_rank=0)
    return replace(made, prediction=prediction)


def _forms(request: Request, mesh: Mesh) -> tuple[bool, ...]:
    """Without and with sequence parallelism, where that is open."""
    if mesh.tp == 1:
        return (False,)
    asked = request.sequence_parallel
    return (False, True) if asked is None else (asked,)


def _plan(
    request: Request,
    mesh: Mesh,
    record: Callable[[int], Recording],
    cluster: Cluster,
    sequence_parallel: bool,
) -> tuple[Plan, Lowered]:
    micro_batches = micro_batches_for(request, mesh)
    recording = record(micro_batches)
    schedule = "1f1b" if request.schedule == "auto" else request.schedule
    choices = _recomputations(request)
    plan, lowered = make_plan(
        recording, mesh, micro_batches, cluster, batch_size=request.batch_size,
        schedule=schedule, order=request.order, chunks=request.chunks, recompute=choices[0],
        sequence_parallel=sequence_parallel,
    )  # fmt: skip
    asked = request.state_shards
    if asked is not None and asked != AUTO:
        plan = replace(plan, state_shards=parse_shards(asked, mesh.dp, len(plan.rank_of)))
    plan = replace(plan, precision=request.precision)
    for choice in choices:
        kept = _kept(replace(lowered, plan=plan), cluster) if choice == "solved" else ()
        plan = replace(plan, recompute=choice, keep_bytes=kept)
        lowered = replace(lowered, plan=plan)
        prediction, _ = predict(lowered, cluster, dp_rank=0)
        suffices = fits(prediction.peak_bytes, cluster, mesh)
        if mesh.dp > 1 and (asked == AUTO or (asked is None and not suffices)):
            plan = replace(plan, state_shards=_fastest_shards(lowered, cluster))
            lowered = replace(lowered, plan=plan)
            prediction, _ = predict(lowered, cluster, dp_rank=0)
        plan = replace(plan, prediction=prediction)
        lowered = replace(lowered, plan=plan)
        if fits(prediction.peak_bytes, cluster, mesh):
            break
    return plan, lowered


def _fastest_shards(lowered: Lowered, cluster: Cluster) -> tuple[StateShards, ...]:
    """The shards of each stage with which its rank waits least for dp, of those that fit.

    Every point of the lattice is simulated once, on all ranks alike: what a rank waits for follows
    from its own stages. Among equals the least is communicated, then the least sharded. Where
    nothing fits a rank, what takes the fewest bytes.
    """
    plan, local = lowered.plan, lowered.stages.local
    touches = {s: rough_touches(graph) for s, graph in enumerate(local)}
    costs = planned_costs(lowered, cluster)
    costs = tuple(map(with_kept, costs, plan.keep_bytes)) if plan.keep_bytes else costs
    memory_bytes = rank_memory_bytes(cluster, plan.mesh)
    keys: list[dict[StateShards, tuple[object, ...]]] = [{} for _ in range(plan.pp)]
    for shards in lattice(plan.dp):
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
    return tuple(best[rank] for rank in plan.rank_of)


def _kept(lowered: Lowered, cluster: Cluster) -> tuple[int, ...]:
    """What each stage may keep of a micro-batch in the cluster's memory."""
    costs = planned_costs(lowered, cluster)
    return keep_bytes(lowered.schedule, costs, rank_memory_bytes(cluster, lowered.plan.mesh))


def _recomputations(request: Request) -> tuple[str, ...]:
    """What to try until the memory suffices."""
    if request.recompute != "auto":
        return (request.recompute,)
    if request.order:
        orders = parse_schedule("\n".join(request.order)).orders
        kinds = {a.kind for order in orders for a in order}
        return ("full",) if ActionKind.RECOMPUTE in kinds else ("none",)
    return ("full",) if request.schedule in ALWAYS_RECOMPUTES else ("none", "solved", "full")


def _factorisations(world: int) -> Iterator[tuple[int, int, int]]:
    for dp in range(1, world + 1):
        if world % dp == 0:
            for tp in range(1, world // dp + 1):
                if world // dp % tp == 0:
                    yield dp, tp, world // dp // tp
