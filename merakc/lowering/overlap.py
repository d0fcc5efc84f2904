"""Decides where tensor-parallel communication runs under computation, and in how many parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Generic, TypeVar

from merakc.costs.device import Place, place_on
from merakc.costs.work.pieces import part_starts
from merakc.errors import ConfigError, MerakError
from merakc.frontend.record import Recording
from merakc.ir.graph import Graph
from merakc.lowering.lowered import (
    TRAINING,
    Lowered,
    cut_stages,
    headed,
    sharded_as_planned,
)
from merakc.machines.cluster import Cluster
from merakc.passes.autodiff.shorten import graph_form, shorten
from merakc.passes.batches.recorded import rows_of
from merakc.passes.overlap.async_collectives import stage_seconds
from merakc.passes.overlap.collective_matmul import RowChunks
from merakc.passes.overlap.fused_products import FusedProducts
from merakc.passes.overlap.sub_batches import Parts, make_parts
from merakc.passes.sharding.gather_products import gathers
from merakc.passes.stages.transfer import stages_like

# Parts of a micro-batch, or chunks of rows, that are tried. More hide more, and multiply smaller
# matrices.
COUNTS = (2, 4)
# Those where the cores that compute carry the messages too, so that less is hidden. Chunks of rows
# are not tried there: a Llama's step on two ranks took more of the CPU's time so than in two parts.
COUNTS_BY_CORES = (2,)
W = TypeVar("W", RowChunks, FusedProducts)
# The share of a stage's seconds that it must save: estimates are not better than that.
WORTH = 0.03


def with_parts(
    lowered: Lowered, record: Callable[[int], Recording], samples: int | None = None
) -> Lowered:
    """The same with the parts of micro-batches that its plan asks for.

    `record` gives the recording for a number of micro-batches. Where `samples`, those of a dp
    rank, do not divide into the parts, a micro-batch runs whole. Raises `PlanError` where the
    graph of a part does not take the plan's splits.
    """
    plan = lowered.plan
    counts = sorted({count for count in plan.sub_batches if count > 1})
    if samples is not None:
        counts = [k for k in counts if samples % (plan.micro_batches * k) == 0]
    return replace(lowered, parts=tuple(_parts(lowered, record, count) for count in counts))


def _parts(lowered: Lowered, record: Callable[[int], Recording], count: int) -> Parts:
    plan, whole = lowered.plan, lowered.loss.graph
    recording = record(plan.micro_batches * count)
    parts = plan.dp * plan.micro_batches * count
    split = headed(recording, parts, TRAINING, plan.tp, gathered=gathers(whole))
    graph, sharding = sharded_as_planned(split.graph, plan)
    of = stages_like(graph, whole, lowered.stages.of)
    stages = cut_stages(graph, of, len(plan.rank_of), sharding)
    return make_parts(whole, lowered.stages, graph, stages, rows_of(recording, split))


def choose_overlap(
    lowered: Lowered, record: Callable[[int], Recording], cluster: Cluster, asked: int | None
) -> Lowered:
    """The same with the parts in which each stage runs a micro-batch, and what that saves.

    `record` gives the recording for a number of micro-batches. `asked` is the number of parts, 0
    for collectives that block; where it is None, each stage gets what takes least time by the
    figures of `cluster`: parts, or the micro-batch whole, with products in chunks of rows or, in
    symmetric memory, in one op with their collectives; none where nothing is hidden. A stage that
    cannot run in the parts asked for gets as many chunks, or runs whole.

    Raises `ConfigError` where parts are asked for and no stage can run in them, nor in chunks.
    """
    plan = lowered.plan
    if asked == 0 or plan.lanes == 1:
        return lowered
    if asked is None and not cluster.hides(plan.mesh.world_size):
        return lowered
    place = overlap_place(cluster, plan.tp, plan.cp)
    open_counts = COUNTS_BY_CORES if place.fabric.by_cores else COUNTS
    counts = open_counts if asked is None else (asked,)
    tried, failure = _tried(lowered, record, counts)
    parted = {count: made for count, made in tried.items() if count > 1}
    forms, gains = [], []
    known: dict[object, tuple[_Form, tuple[str, ...], float]] = {}  # stages are often alike
    for stage, local in enumerate(lowered.stages.local):
        kind, targets = _kind(tried, stage)
        if kind not in known:
            own_s, blocking_s = stage_seconds(local, place)
            found = [_Form(own_s)]
            for count, made in parted.items():
                try:
                    found.append(_Form(stage_seconds(made.local(stage, 0), place)[0], count))
                except MerakError as error:
                    failure = error
            form = _best(found, local, place, asked)
            known[kind] = form, targets, blocking_s
        form, names, blocking_s = known[kind]
        forms.append(form.renamed(dict(zip(names, targets, strict=True))))
        gains.append(1 - form.seconds / blocking_s)
    if asked is None and max(gains) < WORTH:
        return lowered
    chunks = {weight: count for form in forms for weight, count in form.chunks.items()}
    if asked is not None and all(form.count != asked for form in forms) and not chunks:
        raise ConfigError(f"overlap={asked}: no stage can run a micro-batch so: {failure}")
    chosen = replace(
        plan,
        sub_batches=tuple(form.count for form in forms),
        row_chunks=dict(sorted(chunks.items())),
        fused_products=tuple(sorted({weight for form in forms for weight in form.fused})),
        machines=recorded_machines(cluster, plan.lanes),
    )
    return with_parts(replace(lowered, plan=chosen, gains=tuple(gains)), record)


def overlap_gains(lowered: Lowered) -> tuple[float, ...]:
    """The share of its blocking seconds that each stage saves by what runs under computation, on
    the machines that the plan records; none where collectives block.
    """
    plan = lowered.plan
    if lowered.gains is not None or plan.machines is None:
        return lowered.gains or ()
    if not plan.sub_batches or plan.lanes == 1:
        return ()
    place = place_on(plan.machines, plan.tp, cp=plan.cp)
    return tuple(
        1 - stage_seconds(lowered.local(stage, 0), place)[0] / stage_seconds(whole, place)[1]
        for stage, whole in enumerate(lowered.stages.local)
    )


def overlap_place(cluster: Cluster, tp: int, cp: int = 1) -> Place:
    """Where communication is put under computation: on the machines that the plan records, by
    which every rank comes to the same orders.
    """
    return place_on(recorded_machines(cluster, tp * cp), tp, cp=cp)


def recorded_machines(cluster: Cluster, lanes: int) -> Cluster:
    """What of a cluster decides the order of nodes, where so many ranks share a micro-batch."""
    return replace(cluster.joining(lanes), memory_bytes=0, hardware=None)


class _Short(Generic[W]):
    """What can be written of a stage with two and with three of each run of its equal blocks; where
    there are none, of the stage.
    """

    def __init__(self, local: Graph, of: Callable[[Graph], W]) -> None:
        self._local = local
        self._of: Callable[[Graph], W] = of
        self._of_all: W | None = None
        starts = part_starts(local)
        (two, counts), (three, _) = (shorten(local, starts, keep) for keep in (2, 3))
        self.more = max(counts) - 1  # blocks than two in the longest run
        self.written: list[W] = [of(graph) for graph in ((two, three) if self.more else (two,))]

    @property
    def most(self) -> W:
        """Of most blocks."""
        return self.written[-1]

    @property
    def of_all(self) -> W:
        """Of the whole stage."""
        if self._of_all is None:
            self._of_all = self._of(self._local)
        return self._of_all

    def seconds(self, write: Callable[[W], Graph], place: Place) -> float:
        """Those of the whole stage, if each further block takes as long as the third does."""
        found = [stage_seconds(write(own), place)[0] for own in self.written]
        return found[0] + self.more * (found[-1] - found[0])


@dataclass(frozen=True, slots=True)
class _Form:
    """How a stage runs a micro-batch: its seconds, in how many parts, and where it runs whole, the
    weights of products in chunks of rows or in one op with their collectives.
    """

    seconds: float
    count: int = 1
    chunks: Mapping[str, int] = field(default_factory=dict)
    fused: frozenset[str] = frozenset()

    def renamed(self, names: Mapping[str, str]) -> _Form:
        """The form of a stage whose weights have other names."""
        chunks = {names[weight]: count for weight, count in self.chunks.items()}
        return replace(self, chunks=chunks, fused=frozenset(names[w] for w in self.fused))


def _kind(tried: Mapping[int, Lowered], stage: int) -> tuple[object, tuple[str, ...]]:
    """What the best form of a stage depends on, and the targets of its inputs."""
    own, targets = graph_form(tried[1].stages.local[stage])
    found = [own]
    for parts in (parts for made in tried.values() for parts in made.parts):
        local = parts.stages.local[stage]
        passed = [*(item.name for item in local.inputs), *(out.name for out in local.outputs)]
        dims = tuple(map(parts.sample_dims.get, passed))
        found.append((graph_form(local)[0], dims, parts.count))
    return tuple(found), targets


def _best(found: Sequence[_Form], local: Graph, place: Place, asked: int | None) -> _Form:
    """The form of a stage that was asked for, or the fastest of those found and of one micro-batch
    whole.
    """
    for form in found:
        if form.count == asked:
            return form
    best = min(found, key=lambda form: (form.seconds, form.count))
    if asked is not None:
        chunks, seconds = choose_chunks(local, place, (asked,))
        return _Form(seconds, chunks=chunks) if chunks else best
    if place.symmetric_memory:
        fused, seconds = choose_fused(local, place, best.seconds)
        if seconds < best.seconds:
            best = _Form(seconds, fused=fused)
    if not place.fabric.by_cores:
        chunks, seconds = choose_chunks(local, place, COUNTS, best.seconds)
        if seconds < best.seconds:
            best = _Form(seconds, chunks=chunks)
    return best


def choose_chunks(
    local: Graph, place: Place, counts: Sequence[int], most_s: float = math.inf
) -> tuple[dict[str, int], float]:
    """The numbers of chunks of rows for products of a stage, by their weights, and its seconds;
    none where few of its equal blocks tell that it would take more than `most_s`.

    Of each number, first all products that collectives stand beside are in chunks; then those that
    are alike are taken out where the stage is faster without them, told by the few blocks.
    """
    short = _Short(local, RowChunks)
    found: dict[str, int] = {}
    found_s = math.inf
    for count in counts:

        def chunks(kinds: Collection[frozenset[str]], count: int = count) -> dict[str, int]:
            return {weight: count for kind in kinds for weight in kind}

        def seconds(kinds: Collection[frozenset[str]]) -> float:
            return short.seconds(lambda rows: rows.written(chunks(kinds)), place)

        kept, kept_s = _fastest(short.most.kinds(count), seconds)
        if kept and kept_s <= min(most_s, found_s):
            own = chunks(_in_full(kept, short.of_all.kinds(count)))
            own_s = stage_seconds(short.of_all.written(own), place)[0]
            found, found_s = min((found, found_s), (own, own_s), key=itemgetter(1))
    return found, found_s


def _fastest(
    kinds: Sequence[frozenset[str]], seconds: Callable[[Collection[frozenset[str]]], float]
) -> tuple[frozenset[frozenset[str]], float]:
    """All kinds of products but those without which a stage is faster, one after the other, and
    what the stage takes.
    """
    kept = frozenset(kinds)
    best_s = seconds(kept) if kinds else math.inf
    for kind in kinds:
        rest_s = seconds(kept - {kind}) if len(kept) > 1 else math.inf
        if rest_s < best_s:
            kept, best_s = kept - {kind}, rest_s
    return kept, best_s


def _in_full(
    kept: Collection[frozenset[str]], kinds: Sequence[frozenset[str]]
) -> list[frozenset[str]]:
    """The kinds of products of a graph that are like those kept in its short form."""
    weights = frozenset().union(*kept)
    return [kind for kind in kinds if kind & weights]


def choose_fused(
    local: Graph, place: Place, most_s: float = math.inf
) -> tuple[frozenset[str], float]:
    """The weights of the products of a stage that are best in one op with the collective beside
    them, and the seconds of the stage; those that are alike are in it together. None where few of
    its equal blocks tell that it would take more than `most_s`.
    """
    short = _Short(local, FusedProducts)

    def seconds(kinds: Collection[frozenset[str]]) -> float:
        weights = frozenset().union(*kinds)
        return short.seconds(lambda products: products.written(weights), place)

    kept, kept_s = _fastest(short.most.kinds(), seconds)
    if not kept or kept_s > most_s:
        return frozenset(), math.inf
    weights = frozenset().union(*_in_full(kept, short.of_all.kinds()))
    return weights, stage_seconds(short.of_all.written(weights), place)[0]


def _tried(
    lowered: Lowered, record: Callable[[int], Recording], counts: Sequence[int]
) -> tuple[dict[int, Lowered], MerakError | None]:
    """The plan with the same number of parts on all stages, by that number, and why one failed."""
    plan, found = lowered.plan, {1: lowered}
    failure: MerakError | None = None
    for count in counts:
        if plan.batch_size % (plan.micro_batches * count):
            failure = ConfigError(
                f"{plan.batch_size} samples do not divide into {plan.micro_batches} micro-batches "
                f"of {count} parts"
            )
            continue
        parted = replace(plan, sub_batches=(count,) * len(plan.rank_of))
        try:
            found[count] = with_parts(replace(lowered, plan=parted), record)
        except MerakError as error:
            failure = error
    return found, failure
