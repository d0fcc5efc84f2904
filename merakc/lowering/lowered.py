"""From a recording to a plan, and from a plan to the graphs of its stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from merakc.analysis.buckets import BucketSpec
from merakc.analysis.calls import Way, Wiring, ways
from merakc.costs.ranks import stage_devices
from merakc.costs.work.flops import graph_flops
from merakc.errors import PlanError, ShardError
from merakc.frontend.python.fingerprint import fingerprint, first_difference
from merakc.frontend.record import Recording
from merakc.ir.batches import BatchSplit
from merakc.ir.graph import Graph, InputKind, OutputKind
from merakc.ir.layout import Axis, Layout
from merakc.ir.offload import NONE
from merakc.ir.plan import CoupledLoss, OpaqueModule, Plan
from merakc.ir.plan_file import Prediction
from merakc.ir.program import Program, StageGraphs
from merakc.ir.report import CutReport
from merakc.ir.same import Same
from merakc.ir.schedule import Schedule
from merakc.ir.strategy import DECISIONS, NO_EXPERTS, Strategy
from merakc.kernels.opaque import OPAQUE, find
from merakc.lowering.find_samples import check_lists
from merakc.machines.cluster import Cluster
from merakc.passes import pipeline
from merakc.passes.batches.recorded import BatchRecording, couplings_of, dims_of, with_outputs
from merakc.passes.overlap.sub_batches import Parts
from merakc.passes.pipeline import StageOptions
from merakc.passes.programs.collectives import Touches, rank_buckets, rough_touches, trained
from merakc.passes.running import run_passes
from merakc.passes.sharding.gather_products import gather_needed, gathers
from merakc.passes.sharding.layouts import Sharding, unsplit
from merakc.passes.sharding.sequences.gradient_sums import computed_whole
from merakc.passes.sharding.shard import shard
from merakc.passes.stages.match_plan import check_match, holders
from merakc.passes.stages.stage import Stages, assign_stages, stage_runs, stages_of_runs
from merakc.passes.stages.transfer import transfer_stages
from merakc.schedules.planned import planned_schedule
from merakc.schedules.registry import stage_ranks
from merakc.schedules.text import parse_schedule
from merakc.simulation.collective_faults import verify_uses


@dataclass(frozen=True)
class Lowered:
    """A plan applied to a recording: what every rank agrees on, before any rank's own graphs.

    `prediction` is of a step, where one was simulated. `cut` says how its stages were found.
    `gains` are the shares of their blocking seconds that stages save by what runs under
    computation, where they have been worked out.
    """

    plan: Plan
    loss: BatchSplit
    stages: Stages
    parts: tuple[Parts, ...] = ()  # of micro-batches, as the plan has them
    compiled: bool = False  # whether runs of its graphs' calls become kernels
    onednn: bool = False  # whether larger products of float32 are oneDNN's
    prediction: Prediction | None = None
    cut: CutReport | None = None
    gains: tuple[float, ...] | None = None

    @cached_property
    def schedule(self) -> Schedule:
        """The order of work."""
        return planned_schedule(self.plan, whole_batch=self.loss.head is not None)

    def without_nodes(self, same: Same) -> Lowered:
        """The same without the graphs' nodes, and with the `same` values as others have."""
        known = self.loss.known and self.loss.known.without_nodes(same)
        loss = replace(self.loss, graph=self.loss.graph.without_nodes(same), known=known)
        return replace(self, loss=loss, stages=self.stages.without_nodes(same), parts=())

    @property
    def head_stage(self) -> int | None:
        """The stage behind which the samples of the batch are coupled, if they are."""
        return self.stages.head if self.loss.head is not None else None

    @property
    def ways(self) -> tuple[Way, ...]:
        """Over which ways pipeline ranks exchange messages."""
        return ways(self.plan.rank_of, self.stages.transfers)

    @cached_property
    def buckets(self) -> tuple[tuple[BucketSpec, ...], ...]:
        """Of each pipeline rank, what is gathered and reduced together over dp."""
        return rank_buckets(self.plan, self.stages.local)

    def wiring(self) -> Wiring:
        """What is known of a step's communication beside its Programs."""
        plan, tied = self.plan, set[tuple[int, ...]]()
        if plan.has_buckets:
            buckets = dict(enumerate(self.buckets))
        else:  # no parameter stands in a bucket
            buckets = {}
            held = (sorted({plan.rank_of[s] for s in of}) for of in plan.parameters.values())
            tied = {tuple(ranks) for ranks in held if len(ranks) > 1}
        return Wiring(plan.mesh, tuple(plan.rank_of), buckets, tuple(sorted(tied)))

    def options(self, stage: int, lane: int, *, train: bool = True) -> StageOptions:
        """What the passes go by that make one rank's graphs of a stage."""
        order = self.schedule.orders[self.schedule.rank_of[stage]]
        kinds = frozenset(a.kind for a in order if a.stage == stage)
        return StageOptions(
            self.plan, self.stages, stage, lane=lane, kinds=kinds if train else frozenset(),
            parts=self.parts,
            train=train, compiled=self.compiled, onednn=self.onednn,
        )  # fmt: skip

    def stage_graphs(self, stage: int, lane: int, *, train: bool = True) -> StageGraphs:
        """The executable graphs of one rank and stage, with the pieces that the schedule runs;
        without `train` no backward.
        """
        options = self.options(stage, lane, train=train)
        made: StageGraphs = run_passes(pipeline.STAGE, options.graph, options)
        return made

    def local(self, stage: int, lane: int) -> Graph:
        """The forward of a micro-batch on one rank and stage, in parts or with products in chunks
        of rows, or fused with collectives, where the plan says so.
        """
        options = self.options(stage, lane)
        local: Graph = run_passes(pipeline.LOCAL, options.graph, options)
        return local

    def head(self, *, train: bool = True) -> StageGraphs | None:
        """The graphs of what couples the samples of the batch, if anything does; without `train` no
        backward.
        """
        if self.loss.head is None or self.head_stage is None:
            return None
        options = self.options(self.head_stage, 0, train=train)
        options = replace(options, kinds=frozenset(), apart=True)
        made: StageGraphs = run_passes(pipeline.PIECES, self.loss.head.graph, options)
        return made

    def rank_graphs(self, rank: int, *, train: bool = True) -> dict[int, StageGraphs]:
        """The graphs of all stages of one rank of the mesh."""
        _, pipeline_rank, lane = self.plan.mesh.coordinates(rank)
        stages = [s for s, holder in enumerate(self.plan.rank_of) if holder == pipeline_rank]
        return {s: self.stage_graphs(s, lane, train=train) for s in stages}

    def programs(
        self, *, forward_only: bool = False, ranks: Iterable[int] | None = None
    ) -> tuple[Program, ...]:
        """The actions of every rank, or of these, without collectives over dp."""
        programs: tuple[Program, ...] = run_passes(
            pipeline.ORDERED, self.stages, self.plan.mesh, self.schedule, forward_only=forward_only,
            ranks=ranks, head=self.head_stage,
        )  # fmt: skip
        return programs

    def with_collectives(
        self,
        programs: Sequence[Program],
        touches: Mapping[int, Touches] | None = None,
        buckets: Sequence[BucketSpec] | None = None,
    ) -> tuple[Program, ...]:
        """Programs with their collectives over dp.

        Without the `touches` of the stages' own pieces, rough ones are used; `buckets` are those of
        the Programs' one pipeline rank, where they are known. With both, Programs are to be run:
        `ProgramError` is raised where a collective does not stand where the pieces want it.
        """
        if not self.plan.has_collectives:
            return tuple(programs)
        local, is_run = self.stages.local, touches is not None and buckets is not None
        touches = touches or {s: graph.told(rough_touches) for s, graph in enumerate(local)}

        def own(rank: int) -> Sequence[BucketSpec]:
            return self.buckets[rank] if buckets is None else buckets

        gradients = self.loss.graph.told(trained)
        placed: tuple[Program, ...] = run_passes(
            pipeline.PLACED, tuple(programs), self.plan.mesh, touches, own, gradients
        )
        for program in placed if is_run else ():
            verify_uses(program, touches, own(0), gradients)
        return placed


# What training needs of a forward: the loss and the written buffers.
TRAINING = (OutputKind.LOSS, OutputKind.BUFFER)


def training_graph(graph: Graph) -> Graph:
    """The recorded graph for its outputs that training needs."""
    return with_outputs(graph, tuple(o for o in graph.outputs if o.kind in TRAINING))


def make_plan(recording: Recording, strategy: Strategy, cluster: Cluster) -> Lowered:
    """Decides the tensor split and the stages of a recorded forward, for one strategy.

    Of as many stages as the strategy's schedule has with its `chunks` a rank, if these are several,
    or its `order`. Raises `CutError` where the graph does not give them, `ShardError` where
    the ranks of tp or cp do not divide it.
    """
    mesh, tp = strategy.mesh, strategy.tp
    parts = strategy.dp * strategy.micro_batches
    loss = headed(recording, parts, TRAINING, tp)
    sharding = shard(loss.graph, cluster=cluster.joining(tp), **strategy.form._asdict())
    placement = _placement(strategy)
    devices = stage_devices(cluster, mesh, placement)
    of, report = assign_stages(loss.graph, sharding, len(placement), cluster, devices)
    stages = cut_stages(loss.graph, of, len(placement), sharding)
    splits = sharding.splits(loss.graph)
    splits |= _splits_of_results(recording.graph, sharding, loss.graph)
    decided = replace(
        strategy,
        chunks=max(len(placement) // mesh.pp, 1),
        sequence_parallel=bool(sharding.sequences),
        offload=NONE,  # what moves is chosen of the plan
    )
    plan = Plan(
        **{name: getattr(decided, name) for name in DECISIONS},
        model=recording.model_name,
        graph=fingerprint(recording.graph),
        stages=stage_runs(loss.graph, of),
        parameters=holders(stages.graphs),
        splits={name: str(layout) for name, layout in splits.items()},
        whole_ops=tuple(o for o in sharding.whole_ops(loss.graph) if not o.startswith(OPAQUE)),
        opaque_modules=_opaque_modules(loss, parts),
        **_of_batches(recording, loss, stages),
        placement=placement if placement != tuple(range(mesh.pp)) else (),
    )
    return Lowered(plan, loss, stages, cut=report)


def _placement(strategy: Strategy) -> tuple[int, ...]:
    """The pipeline rank of each stage."""
    if strategy.order:
        return parse_schedule("\n".join(strategy.order), strategy.schedule).rank_of
    several = strategy.chunks if strategy.chunks > 1 else None
    return stage_ranks(strategy.schedule, strategy.pp, several)


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
    loss = headed(recording, plan.dp * plan.micro_batches, TRAINING, plan.tp)
    sharding = planned_sharding(loss.graph, plan)
    of = stages_of_runs(loss.graph, plan.stages)
    stages = cut_stages(loss.graph, of, len(plan.rank_of), sharding)
    check_match(plan, recording.graph, loss.graph, stages)
    return Lowered(plan, loss, stages)


def adapt_plan(
    lowered: Lowered, recording: Recording, *, results: bool, kept: Collection[str] = ()
) -> Lowered:
    """Applies a plan to another recording of the same model: eval mode, or other shapes.

    Parameters stay where they are; with `results`, everything that the forward returns is
    computed, otherwise the loss, and what of the results is to be `kept`. Raises `ConfigError`
    where the batch has lists that several ranks may join in two ways.
    """
    plan = lowered.plan
    parts, kinds = plan.dp * plan.micro_batches, () if results else TRAINING
    if isinstance(recording, BatchRecording):
        check_lists(recording, recording.dims)
        parts = recording.layout.parts  # fewer, where each dp rank runs all of a batch
    gathered = gathers(lowered.loss.graph)
    loss = headed(recording, parts, kinds, plan.tp, gathered=gathered, kept=kept)
    graph, sharding = sharded_as_planned(loss.graph, plan)
    loss = replace(loss, graph=graph)
    if len(plan.rank_of) == 1:
        of = dict.fromkeys((n.name for n in loss.graph.nodes), 0)
    else:
        of = transfer_stages(loss.graph, lowered.loss.graph, lowered.stages.of, plan.parameters)
    stages = cut_stages(loss.graph, of, len(plan.rank_of), sharding)
    return replace(lowered, loss=loss, stages=stages, parts=())


def headed(
    recording: Recording,
    parts: int,
    kinds: tuple[OutputKind, ...],
    tp: int,
    *,
    gathered: bool | None = None,
    kept: Collection[str] = (),
) -> BatchSplit:
    """The step whose graph is sharded and cut, for outputs as in `in_parts`: in parts, with heads
    apart, and products to be gathered.

    `gathered` says whether its products are to be gathered; where it is None, the graph does.
    """
    split: BatchSplit = run_passes(pipeline.PARTS, recording, parts, kinds, kept)
    return replace(split, graph=with_heads(split.graph, tp, gathered=gathered))


def with_heads(graph: Graph, tp: int, *, gathered: bool | None = None) -> Graph:
    """The graph of `headed`."""
    found: Graph = run_passes(pipeline.HEADED, graph, tp, gathered)
    return found


def cut_stages(graph: Graph, of: Mapping[str, int], count: int, sharding: Sharding) -> Stages:
    """The graph cut into stages, as `split_stages` does."""
    stages: Stages = run_passes(pipeline.CUT, graph, of, count, sharding)
    return stages


def _splits_of_results(graph: Graph, sharding: Sharding, loss: Graph) -> dict[str, Layout]:
    """The layouts of the split tensors that only the results read, as those of the loss demand."""
    tp = sharding.tp
    trained = {i.target for i in training_graph(graph).inputs}
    kinds = (InputKind.PARAMETER, InputKind.BUFFER)
    if tp == 1 or all(i.target in trained for i in graph.inputs if i.kind in kinds):
        return {}
    whole = with_heads(with_outputs(graph, graph.outputs), tp, gathered=gathers(loss))
    try:
        found = shard(whole, tp, sharding.tp_splits(loss)).splits(whole)
    except PlanError:  # the results need whole what training splits: `predict` refuses them
        return {}
    if sharding.context is not None and sharding.context.has_experts:
        found = {name: layout.within(Axis(tp, 1)) for name, layout in found.items()}
    return {name: layout for name, layout in found.items() if name not in trained}


def planned_sharding(graph: Graph, plan: Plan) -> Sharding:
    """The plan's split of a graph over tp; raises `PlanError` where the graph does not allow it."""
    return shard(graph, splits=plan.tp_splits, **plan.form._asdict())


def sharded_as_planned(graph: Graph, plan: Plan) -> tuple[Graph, Sharding]:
    """The plan's split of a graph that it was not made from: products are gathered where only so
    the graph allows it.
    """
    if plan.lanes == 1:
        return graph, unsplit(graph)
    try:
        return graph, planned_sharding(graph, plan)
    except ShardError:
        if plan.cp == 1:
            raise
        splits = {name: str(layout) for name, layout in plan.tp_splits.items()}
        alone, own = sharded_as_planned(graph, replace(plan, cp=1, splits=splits, **NO_EXPERTS))
        context = computed_whole(alone, plan.cp, plan.expert_splits)
        return alone, replace(own, context=context)
    except PlanError as error:
        gathered = gather_needed(graph, plan.tp_splits)
        try:
            return gathered, planned_sharding(gathered, plan)
        except PlanError:
            raise error from None


def _of_batches(recording: Recording, loss: BatchSplit, stages: Stages) -> dict[str, Any]:
    """What the plan says of the batch and its parts."""
    return {
        "couplings": couplings_of(recording),
        "batch_dims": dims_of(recording),
        "conventions": loss.conventions,
        "head": _coupled(loss, stages),
    }


def _coupled(loss: BatchSplit, stages: Stages) -> CoupledLoss | None:
    """What the plan tells of a loss that couples samples."""
    head, stage = loss.head, stages.head
    if head is None or stage is None:
        return None
    return CoupledLoss(stage, head.source, head.why, head.size_bytes)


def _opaque_modules(loss: BatchSplit, parts: int) -> tuple[OpaqueModule, ...]:
    """The modules that run as they are, each once, with what all their calls compute."""
    graphs = [(loss.graph, parts), *([(loss.head.graph, 1)] if loss.head else [])]
    total = max(sum(graph_flops(graph) * times for graph, times in graphs), 1)
    calls = [
        (find(n.args[-1]), times) for graph, times in graphs for n in graph.nodes if n.op == OPAQUE
    ]
    flops: Counter[str] = Counter()
    for call, times in calls:
        flops[call.module] += call.flops * times
    seen = {call.module: call for call, _ in reversed(calls)}
    return tuple(
        OpaqueModule(name, seen[name].source, seen[name].reason, flops[name] / total)
        for name in dict.fromkeys(call.module for call, _ in calls)
    )
