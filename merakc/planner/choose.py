"""Chooses a plan: layouts are priced by their pieces, the best planned in full and improved.

`auto_parallel` and `merakc plan` choose so, with the same code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from merakc.costs import state
from merakc.costs.work.scaled import SAMPLES
from merakc.errors import MerakError
from merakc.ir.graph import InputKind
from merakc.ir.state import AUTO, StateShards
from merakc.lowering.lowered import Lowered
from merakc.machines.cluster import Cluster
from merakc.planner.bounds import Layout
from merakc.planner.candidates import FAR, Candidate, Candidates, find_candidates
from merakc.planner.estimate import rank_of
from merakc.planner.piece_table import PieceTable
from merakc.planner.search import (
    Record,
    Request,
    improve,
    least_seconds,
    meshes,
    plan_layout,
    standing,
)
from merakc.report.units import count_of
from merakc.schedules.bound import lower_bound_s
from merakc.schedules.timing import make_pipeline

# The best candidates are planned in full, as many as have so many nodes in all, and two at least.
FINALIST_NODES = 9_000
MOST_FINALISTS = 16

Progress = Callable[[str], None]


def choose(
    request: Request,
    record: Record,
    cluster: Cluster,
    progress: Progress = lambda _: None,
    candidates: Candidates | None = None,
) -> Lowered:
    """The fastest plan per sample that fits the memory, by simulation.

    `record` gives the recording of a micro-batch of so many samples; `candidates` are those of
    `compare`, which is called where it must be. Where everything is fixed its plan is made, even if
    it seems not to fit. Raises the first error where nothing can be planned.
    """
    cluster = cluster.with_hardware(request.world_size)
    sole = _sole(request, record, cluster)
    if sole is not None:
        return sole
    candidates = candidates or compare(request, record, cluster, progress)
    finalists: list[Lowered] = []
    first_error: MerakError | None = None
    nodes = len(record(SAMPLES[0]).graph.nodes)
    left = min(max(2, FINALIST_NODES // nodes), MOST_FINALISTS)
    best_s = math.inf
    for layout, shards, least_s in _finalists(request, candidates):
        if best_s <= least_s or not left:
            continue
        left -= 1
        progress(f"planning {describe(layout)}")
        try:
            found = plan_layout(asked_for(request, layout, shards), record, cluster)
        except MerakError as error:
            first_error = first_error or error
            continue
        finalists.append(found)
        too_big, sample_s, _ = standing(found, cluster)
        best_s = best_s if too_big else min(best_s, sample_s)
    best: Lowered | None = None
    for lowered in sorted(finalists, key=lambda one: standing(one, cluster)):
        samples = lowered.plan.dp * lowered.plan.batch_size
        least = False, least_seconds(lowered, cluster) / samples, 0
        if best is not None and standing(best, cluster) <= least:
            continue
        progress("improving the best plans")
        try:
            made = improve(request, lowered, record, cluster)
        except MerakError as error:
            first_error = first_error or error
            continue
        if best is None or standing(made, cluster) < standing(best, cluster):
            best = made
    if best is None:
        assert first_error is not None
        raise first_error
    return best


def _sole(request: Request, record: Record, cluster: Cluster) -> Lowered | None:
    """The plan of a request with one mesh, without a pipeline or with all of it fixed; None where
    there are other layouts to compare.

    Without a pipeline no layout is faster than the batch in one piece: if that fits the memory.
    """
    mesh, *others = meshes(request)
    is_fixed = request.micro_batches is not None
    if others or (mesh.pp > 1 and (request.schedule == "auto" or not is_fixed)):
        return None
    local = request.local_batch_size(mesh.dp)
    assert local is not None, "the request is checked"
    asked = request.sequence_parallel
    forms = (False,) if mesh.tp == 1 else (False, True) if asked is None else (asked,)
    made: list[Lowered] = []
    for form in forms:
        own = replace(
            request, batch_size=local, total_batch_size=None, sequence_parallel=form, dp=mesh.dp,
            tp=mesh.tp, pp=mesh.pp,
        )  # fmt: skip
        lowered = plan_layout(own, record, cluster)
        made.append(improve(request, lowered, record, cluster))
    best = min(made, key=lambda one: standing(one, cluster))
    too_big, *_ = standing(best, cluster)
    return None if too_big and not is_fixed else best


def compare(
    request: Request, record: Record, cluster: Cluster, progress: Progress = lambda _: None
) -> Candidates:
    """The layouts of a request, by their pieces. Raises as `find_candidates` does."""
    table = PieceTable(record, cluster)
    hardware = cluster.described(request.world_size)
    precision = state_precision(record, request)
    return find_candidates(table, request, hardware, precision, progress)


def state_precision(record: Record, request: Request) -> state.Precision:
    """The bytes of a parameter's state: of the precision, or of the parameters' own dtype."""
    own = request.precision
    if own is not None:
        compute, gradients, master = (
            own.dtype(of).itemsize for of in ("compute", "gradients", "master")
        )
        return state.Precision(compute, gradients, 3 * master)
    inputs = record(SAMPLES[0]).graph.inputs
    sizes = [i.spec.dtype.itemsize for i in inputs if i.kind is InputKind.PARAMETER]
    size = max(sizes, default=4)
    return state.Precision(size, size, 2 * size)


def asked_for(request: Request, layout: Layout, shards: StateShards | None = None) -> Request:
    """The request, with everything fixed that a layout decides; collectives block."""
    d, asked = layout.degrees, request.state_shards
    found = asked
    if shards is not None and asked in (None, AUTO):
        found = shards.parameters, shards.gradients, shards.optimizer
    return replace(
        request,
        batch_size=d.micro_batches * layout.samples,
        total_batch_size=None,
        dp=d.dp,
        tp=d.tp,
        pp=d.pp,
        inner=d.inner,
        micro_batches=d.micro_batches,
        schedule=d.schedule if request.schedule == "auto" else request.schedule,
        chunks=d.chunks if d.chunks > 1 else None,
        overlap=0,
        sequence_parallel=layout.sequence_parallel,
        state_shards=found,
    )


def describe(layout: Layout) -> str:
    """A layout, in a line."""
    d = layout.degrees
    chunks = f" of {d.chunks} stages a rank" if d.chunks > 1 else ""
    parts = [f"dp={d.dp} tp={d.tp} pp={d.pp}", count_of(d.micro_batches, "micro-batch")]
    if d.pp > 1:
        parts.append(f"{d.schedule}{chunks}")
    return ", ".join(parts)


def _finalists(
    request: Request, candidates: Candidates
) -> Iterator[tuple[Layout, StateShards | None, float]]:
    """What may be planned in full, with the seconds a sample that it takes at the least: the best
    candidate of all, those of other meshes, and then the others, the faster first. Of each layout
    the better axis inside, and the best schedule where an order is made for it. Where nothing fits,
    what lacks least.
    """
    if not candidates.found:
        yield from ((layout, None, 0.0) for layout in candidates.nearest[:1])
    first: dict[object, Candidate] = {}
    for one in candidates.found:
        own = one.layout.degrees
        schedule = "auto" if request.schedule == "auto" else own.schedule
        degrees = replace(own, inner="pp", schedule=schedule)
        first.setdefault(replace(one.layout, degrees=degrees), one)
    of_mesh = {replace(c.layout.degrees.mesh, inner="pp"): id(c) for c in reversed(first.values())}
    for one in sorted(first.values(), key=lambda c: id(c) not in of_mesh.values()):
        yield one.layout, one.habits.shards, _least_sample_s(request, one)


def _least_sample_s(request: Request, one: Candidate) -> float:
    """Seconds a sample of a candidate, planned in full, with the best order of work if it is open;
    both at the least.
    """
    estimate, d = one.estimate, one.layout.degrees
    if request.schedule != "auto" or d.pp == 1:
        return one.sample_s / FAR
    pipeline = make_pipeline(rank_of(d), estimate.stages, d.micro_batches)
    order_s = min(estimate.pipeline_s, lower_bound_s(pipeline, [math.inf] * d.pp))
    rest_s = estimate.step_s - estimate.pipeline_s
    return (order_s + rest_s) / one.layout.batch_size / FAR
