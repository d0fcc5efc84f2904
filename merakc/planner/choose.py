"""Chooses a plan: layouts are priced by their pieces, the best planned in full and improved.

`auto_parallel` and `merakc plan` choose so, with the same code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice

from merakc.costs import state
from merakc.costs.work.scaled import SAMPLES
from merakc.errors import ConfigError, MerakError, ShardError
from merakc.ir.graph import InputKind
from merakc.ir.strategy import Form, Strategy
from merakc.lowering.lowered import Lowered
from merakc.lowering.predict import predict
from merakc.machines.cluster import Cluster
from merakc.planner.candidates import Candidates, Limits, find_candidates
from merakc.planner.forms import experts_of, open_forms
from merakc.planner.piece_table import PieceTable
from merakc.planner.request import Request, meshes
from merakc.planner.search import (
    Record,
    can_beat,
    improve,
    is_pressed,
    least_seconds,
    plan_layout,
    standing,
)
from merakc.simulation.nccl import verify_calls

# The best candidates are planned in full, as many as have so many nodes in all, and two at least.
FINALIST_NODES = 9_000
MOST_FINALISTS = 16
# As many more are planned while none fits.
MORE_FINALISTS = 4
# Others are planned, too, where they are so much faster by their pieces than the best in full.
OFF = 1.02

Progress = Callable[[str], None]


@dataclass
class Patience:
    """Whether Ctrl-C ends a search with the best that it has found (once; then it ends all), and
    whether it has.
    """

    bears: bool = False
    stopped: bool = False

    @contextmanager
    def while_looking(self, has_found: Callable[[], bool]) -> Iterator[None]:
        """Ends what is done inside on Ctrl-C, if something was found before."""
        try:
            yield
        except KeyboardInterrupt:
            if not self.bears or self.stopped or not has_found():
                raise
            self.stopped = True


def choose(
    request: Request,
    record: Record,
    cluster: Cluster,
    progress: Progress = lambda _: None,
    candidates: Candidates | None = None,
    patience: Patience | None = None,
) -> Lowered:
    """The fastest plan per sample that fits the memory, by simulation.

    `record` gives the recording of a micro-batch of so many samples; `candidates` are those of
    `compare`, which is called where it must be. Where everything is fixed its plan is made, even if
    it seems not to fit. Once the `patience` is at its end the best so far is taken, and planned in
    full if none is yet. Raises the first error where nothing can be planned.
    """
    cluster, patience = cluster.with_hardware(request.world_size), patience or Patience()
    _check_rates(request, cluster)
    sole = None if patience.stopped else _sole(request, record, cluster)
    if sole is not None:
        return _in_full(sole, cluster)
    errors: list[MerakError] = []
    candidates = candidates or compare(request, record, cluster, progress)
    planned: list[Lowered] = []
    improved: list[Lowered] = []
    with patience.while_looking(lambda: bool(planned or candidates.ranked)):
        for lowered in _planned(request, candidates, record, cluster, progress, errors):
            planned.append(lowered)
            if patience.stopped:
                break
    if patience.stopped and not planned:  # the best of those that were compared
        planned += islice(_planned(request, candidates, record, cluster, progress, errors), 1)
    planned.sort(key=lambda one: standing(one, cluster))
    with patience.while_looking(lambda: bool(planned)):
        if not patience.stopped:
            better = _improved(request, planned, record, cluster, progress, errors)
            improved.extend(better)
    found = improved[-1:] or (planned[:1] if patience.stopped else [])
    if not found:
        raise errors[0]
    return _in_full(found[0], cluster)


def _in_full(lowered: Lowered, cluster: Cluster) -> Lowered:
    """The same plan with the prediction of its whole step, whose calls on communicators come to
    their end on GPUs, too.
    """
    mesh = lowered.plan.mesh
    programs = lowered.programs(ranks=[mesh.rank(0, r, 0) for r in range(mesh.pp)])
    verify_calls(lowered.with_collectives(programs), lowered.wiring())
    return replace(lowered, prediction=predict(lowered, cluster, dp_rank=0, traced=False)[0])


def _planned(
    request: Request, candidates: Candidates, record: Record, cluster: Cluster, progress: Progress,
    errors: list[MerakError],
) -> Iterator[Lowered]:  # fmt: skip
    """The candidates in full that could become the fastest, as many as there is time for; errors
    are added to those that there are.
    """
    nodes = len(record(SAMPLES[0]).graph.nodes)
    # As many with experts on ranks of their own as without, and beside tp: no more open search
    # finds less.
    kinds = map(_kind, candidates.table.forms)
    left = dict.fromkeys(kinds, min(max(2, FINALIST_NODES // nodes), MOST_FINALISTS))
    best_s, later, count = math.inf, list[Finalist](), 0

    def planned(one: Finalist) -> Iterator[Lowered]:
        nonlocal best_s, count
        count += 1
        progress(f"planning {one.strategy}")
        try:
            lowered = plan_layout(one.asked, record, cluster)
        except MerakError as error:
            errors.append(error)
            return
        too_big, sample_s, _ = standing(lowered, cluster)
        best_s = best_s if too_big else min(best_s, sample_s)
        yield lowered

    def limits() -> tuple[float, float]:
        """Once the others are planned, what is so much faster by its pieces than the best is."""
        is_open = best_s == math.inf or max(left.values()) > 0
        return math.inf if is_open else best_s / OFF, best_s

    for one in _finalists(request, candidates, limits):
        most = 0 if best_s < math.inf else -MORE_FINALISTS
        kind = _kind(one.strategy.form)
        if best_s <= one.least_sample_s:
            continue
        if left[kind] <= most:
            later.append(one)
            continue
        left[kind] -= 1
        yield from planned(one)
    for one in sorted(later, key=lambda one: one.sample_s):
        if count < MOST_FINALISTS and one.sample_s * OFF < best_s < math.inf:
            yield from planned(one)


def _improved(
    request: Request, planned: Sequence[Lowered], record: Record, cluster: Cluster,
    progress: Progress, errors: list[MerakError],
) -> Iterator[Lowered]:  # fmt: skip
    """What is planned in full, improved where that could be the fastest: each that is faster than
    those before it. Errors are added to those that there are.
    """
    best: Lowered | None = None
    for lowered in planned:
        least_s = least_seconds(lowered, cluster)
        if best is not None and not can_beat(least_s, lowered, best, cluster):
            continue
        progress("improving the best plans")
        try:
            better = improve(request, lowered, record, cluster, best)
        except MerakError as error:
            errors.append(error)
            continue
        if best is None or standing(better, cluster) < standing(best, cluster):
            best = better
            yield best


def _sole(request: Request, record: Record, cluster: Cluster) -> Lowered | None:
    """The plan of a request with one mesh, without a pipeline, with all of it fixed or with one
    micro-batch; None where there are other layouts to compare.

    Without a pipeline no layout is faster than the batch in one piece: if that fits the memory as
    it is. What fits only by recomputation, for example, is compared with micro-batches.
    """
    mesh, *others = meshes(request)
    is_fixed = request.micro_batches is not None
    is_open = request.schedule == "auto" and request.micro_batches != 1  # of one, orders are alike
    if others or (mesh.pp > 1 and (is_open or not is_fixed)):
        return None
    local = request.local_batch_size(mesh.dp)
    assert local is not None, "the request is checked"
    lanes = mesh.lanes
    experts = experts_of(record(local // (request.micro_batches or 1)).graph) if lanes > 1 else 0
    forms = [f for f in open_forms(request, lanes, experts) if f.lanes == lanes]
    whole = replace(request, batch_size=local, total_batch_size=None, dp=mesh.dp, pp=mesh.pp)
    made: list[Lowered] = []
    for form in forms:
        asked = replace(whole, **form._asdict())
        try:
            lowered = plan_layout(asked, record, cluster)
        except ShardError:
            if form.cp in (1, request.cp):
                raise
            continue  # nobody has asked for it
        if not is_fixed and is_pressed(request, lowered, cluster):
            return None
        made.append(improve(request, lowered, record, cluster))
    best = min(made, key=lambda one: standing(one, cluster))
    too_big, *_ = standing(best, cluster)
    return None if too_big and not is_fixed else best


def compare(
    request: Request,
    record: Record,
    cluster: Cluster,
    progress: Progress = lambda _: None,
    table: PieceTable | None = None,
    patience: Patience | None = None,
) -> Candidates:
    """The strategies of a request, by their pieces: those before the `patience` is at its end.
    Raises as `find_candidates` does.
    """
    found = Candidates(table=table or PieceTable(record, cluster))
    hardware = cluster.described(request.world_size)
    _check_rates(request, cluster)
    precision = state_precision(record, request)
    with (patience or Patience()).while_looking(lambda: bool(found.ranked)):
        find_candidates(found, request, hardware, precision, progress)
    return found


def _check_rates(request: Request, cluster: Cluster) -> None:
    """Raises `ConfigError` where a device is not known to have the products of the precision."""
    dtype = request.precision and request.precision.products
    for device in cluster.described(request.world_size).devices if dtype else ():
        if dtype not in device.peak_flops_per_s:
            raise ConfigError(
                f"precision: {device.name} has no products of {dtype} in its cluster file; use "
                f"bf16-mixed, other machines, or give their rate, peak_flops_per_s.{dtype}"
            )


def state_precision(record: Record, request: Request) -> state.Precision:
    """The bytes of a parameter's state: of the precision, or of the parameters' own dtype."""
    precision = request.precision
    if precision is not None:
        compute, gradients, master = (
            precision.dtype(of).itemsize for of in ("compute", "gradients", "master")
        )
        return state.Precision(compute, gradients, 3 * master)
    inputs = record(SAMPLES[0]).graph.inputs
    sizes = [i.spec.dtype.itemsize for i in inputs if i.kind is InputKind.PARAMETER]
    size = max(sizes, default=4)
    return state.Precision(size, size, 2 * size)


@dataclass(frozen=True)
class Finalist:
    """What may be planned in full, as a request, with the seconds a sample that its pieces say, and
    those that it takes at the least.
    """

    strategy: Strategy
    asked: Request
    sample_s: float = 0.0
    least_sample_s: float = 0.0


def _kind(form: Form) -> int:
    """Whether experts are on ranks of their own, and beside tp."""
    return form.expert_parallel * min(form.tp, 2)


def _finalists(
    request: Request, candidates: Candidates, limits: Limits = lambda: (math.inf, math.inf)
) -> Iterator[Finalist]:
    """The best candidate of all, those of other meshes, and then the others, the faster first,
    within the `limits`. Of each the better axis inside, and the best schedule where an order is
    made for it. Where nothing fits, what lacks least.
    """
    if not candidates.ranked:
        for strategy in candidates.nearest[:1]:
            yield Finalist(strategy, request.decided(strategy, state=False))
    known: set[object] = set()
    tried: set[object] = set()
    others: list[Finalist] = []
    for one in candidates.in_order(limits):
        schedule = "auto" if request.schedule == "auto" else one.strategy.schedule
        alike = replace(
            one.strategy, inner="pp", schedule=schedule, recompute="none", state_shards=(),
            offload="none",
        )  # fmt: skip
        if alike in known:
            continue
        known.add(alike)
        asked = request.decided(one.strategy)
        finalist = Finalist(one.strategy, asked, one.sample_s, one.least_sample_s)
        if alike.mesh in tried:
            others.append(finalist)
        else:
            tried.add(alike.mesh)
            yield finalist
    yield from others
