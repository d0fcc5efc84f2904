"""The passes, in the order in which they run: to add one is to add an entry.

Each list is run as it stands by `run_passes`, with options that all its passes share.
`merakc show --passes` tells what each did to a model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from merakc.costs.device import place_on
from merakc.costs.work.flops import PRODUCTS
from merakc.ir.graph import Graph
from merakc.ir.plan import Plan
from merakc.ir.program import ActionKind, Mesh, Program, StageGraphs
from merakc.ir.recompute import IN_BACKWARD, Keep, Run, parse_runs
from merakc.ir.schedule import Schedule
from merakc.machines.cluster import NOMINAL_GPU
from merakc.passes.autodiff.algebra import fewer_passes
from merakc.passes.autodiff.batch_statistics import with_statistics
from merakc.passes.autodiff.differentiate import joint_graph, partition
from merakc.passes.autodiff.loss_gradient import without_zeros
from merakc.passes.autodiff.recompute import checkpointed, within_bytes
from merakc.passes.autodiff.rematerialise import late, lean, rematerialised
from merakc.passes.autodiff.simplify import simplify
from merakc.passes.autodiff.split_backward import split_backward
from merakc.passes.batches.part import with_keys
from merakc.passes.batches.recorded import in_parts
from merakc.passes.forward.activations import with_activations
from merakc.passes.forward.constant_masks import with_known_masks
from merakc.passes.forward.grouped_heads import with_grouped_heads
from merakc.passes.forward.loops import rolled
from merakc.passes.forward.scaled_products import with_scaled_products
from merakc.passes.forward.scores import without_scores
from merakc.passes.forward.sinks import with_sinks
from merakc.passes.offload.moves import offloaded
from merakc.passes.overlap.async_collectives import overlapped, same_nodes
from merakc.passes.overlap.collective_matmul import chunk_rows
from merakc.passes.overlap.fused_products import fuse_products
from merakc.passes.overlap.sub_batches import Parts, divided
from merakc.passes.programs.collectives import placed_collectives
from merakc.passes.programs.onednn import by_onednn
from merakc.passes.programs.schedule import build_programs
from merakc.passes.recompute.blocks import by_layers, find_blocks, in_place
from merakc.passes.recompute.segments import recomputed
from merakc.passes.running import Kind, Pass, run_passes, unwatched
from merakc.passes.sharding.experts.dispatch import without_rows
from merakc.passes.sharding.experts.loops import with_sorted_loops
from merakc.passes.sharding.experts.sorted_forms import with_sorted_forms
from merakc.passes.sharding.gather_products import gather_all, gather_products
from merakc.passes.sharding.separate_heads import separate_heads
from merakc.passes.sharding.spmd import spmd_partition
from merakc.passes.stages.stage import Stages, split_stages


@dataclass(frozen=True, slots=True)
class StageOptions:
    """What the passes go by that make the graphs of one stage, for one lane.

    `kinds` are the computes that the schedule has of it. What runs once for the whole batch is as a
    stage by itself, of which nothing is split: `apart`.
    """

    plan: Plan
    stages: Stages
    stage: int
    lane: int
    kinds: frozenset[ActionKind] = frozenset()
    parts: tuple[Parts, ...] = ()
    train: bool = True
    compiled: bool = False
    onednn: bool = False
    apart: bool = False

    @property
    def in_parts(self) -> Parts | None:
        """The parts in which the stage runs a micro-batch, if it does."""
        count = self.plan.sub_batches[self.stage] if self.plan.sub_batches and self.train else 1
        return next((parts for parts in self.parts if parts.count == count), None)

    @property
    def graph(self) -> Graph:
        """The forward of the stage."""
        return self.stages.graphs[self.stage]

    def unlike(self) -> tuple[int, ...]:
        """A lane for each set of sizes that parts of the stage's values have, if they differ."""
        lanes = self.stages.sharding.unlike_lanes(self.graph)
        return lanes if len(lanes) > 1 else ()

    def others(self) -> list[Graph]:
        """The local forwards of those lanes."""
        return [spmd_partition(self.graph, self.stages.sharding, lane) for lane in self.unlike()]


def _gather(graph: Graph, tp: int, gathered: bool | None) -> Graph:
    if gathered is None:
        return gather_products(graph, tp)
    return gather_all(graph) if gathered else graph


def _divide(local: Graph, at: StageOptions) -> Graph:
    parts = at.in_parts
    if parts is None:
        return local
    part = spmd_partition(parts.stages.graphs[at.stage], parts.stages.sharding, at.lane)
    return divided(local, part, parts)


def _fuse(local: Graph, at: StageOptions) -> Graph:
    weights = at.plan.fused_products
    if not (weights and at.train) or at.in_parts is not None:
        return local
    return fuse_products(local, weights, at.others())


def _chunk_rows(local: Graph, at: StageOptions) -> Graph:
    chunks, fused = at.plan.row_chunks, any(n.op in PRODUCTS for n in local.nodes)
    if not (chunks and at.train) or at.in_parts is not None or fused:
        return local
    return chunk_rows(local, chunks, at.others())


def _freeze(graph: Graph, at: StageOptions) -> Graph:
    if at.train:
        return graph
    return replace(graph, inputs=tuple(replace(i, requires_grad=False) for i in graph.inputs))


def _split_backward(stage: StageGraphs, at: StageOptions) -> StageGraphs:
    return stage if ActionKind.INPUT_GRAD not in at.kinds else _split(stage)


def _split(stage: StageGraphs) -> StageGraphs:
    if stage.backward is None:
        return stage
    input_grad, weight_grad = split_backward(stage)
    return replace(stage, input_grad=input_grad, weight_grad=weight_grad)


def _checkpoint(stage: StageGraphs, at: StageOptions) -> StageGraphs:
    if ActionKind.RECOMPUTE not in at.kinds:
        return stage
    keep_bytes = at.plan.keep_bytes[at.stage] if at.plan.recompute == "solved" else 0
    return _with_checkpoint(stage, keep_bytes, at.plan.tp, at.plan.cp)


def _with_checkpoint(stage: StageGraphs, keep_bytes: int, tp: int, cp: int) -> StageGraphs:
    # Only the ratio of arithmetic to traffic matters, and a plan means the same everywhere.
    place = place_on(NOMINAL_GPU, tp, cp=cp)
    return checkpointed(stage, within_bytes(stage, keep_bytes, place) if keep_bytes else ())


def _recompute(stage: StageGraphs, at: StageOptions) -> StageGraphs:
    if at.apart or not at.train or at.plan.recompute not in IN_BACKWARD:
        return stage
    kept = at.plan.kept_blocks
    if at.compiled and stage.backward is not None:
        # What joins the kernels stands at the backward's start, and would have all made there.
        stage = replace(stage, backward=late(stage.backward))
    return _made_again(stage, at.plan.recompute, kept[at.stage] if kept else "")


def _made_again(stage: StageGraphs, recompute: str, kept: str) -> StageGraphs:
    if stage.backward is None or recompute not in IN_BACKWARD:
        return stage
    return recomputed(stage, parse_runs(kept) if kept else uniform(stage, recompute))


def uniform(stage: StageGraphs, recompute: str) -> tuple[Run, ...]:
    """What the blocks of a stage keep where all are made again, or all keep their products."""
    forward = in_place(stage.forward)
    keep = Keep.PRODUCTS if recompute == "selective" else Keep.AGAIN
    return by_layers(find_blocks(forward), forward, keep)


def _overlap(stage: StageGraphs, at: StageOptions) -> StageGraphs:
    plan = at.plan
    if at.apart or not at.train or not plan.sub_batches or plan.lanes == 1:
        return stage
    place = place_on(plan.machines or NOMINAL_GPU, plan.tp, cp=plan.cp)
    # Every rank comes to the same order, without a word to the others.
    before = STAGE[: [p.name for p in STAGE].index("overlap")]
    with unwatched():
        kinds = [run_passes(before, at.graph, replace(at, lane=r)) for r in at.unlike()]
    kinds = kinds or [stage]
    alike = all(same_nodes(c, kinds[0]) for c in kinds)
    return overlapped(stage, place, kinds[0]) if alike else stage


def _offload(stage: StageGraphs, at: StageOptions) -> StageGraphs:
    plan = at.plan
    if at.apart or not at.train or not plan.host_activations or stage.backward is None:
        return stage
    return with_moves(stage, plan, at.stage)


def with_moves(pieces: StageGraphs, plan: Plan, stage: int) -> StageGraphs:
    """The pieces of a stage, with moves of what waits on the host, by the plan's machines."""
    place = place_on(plan.machines or NOMINAL_GPU, plan.tp, cp=plan.cp)
    return offloaded(pieces, plan.host_activations[stage], place)


def _programs(stages: Stages, mesh: Mesh, schedule: Schedule, **how: Any) -> tuple[Program, ...]:
    return build_programs(mesh, schedule, stages.transfers, **how)


# Of every recording of the forward, for any number of samples.
RECORDED: Final = (
    Pass("roll-loops", "Takes loops over equal calls together in one.",
         Kind.RECORDED, Kind.RECORDED, rolled),
    Pass("sorted-loops", "Takes loops over experts together: rows are sorted by their expert.",
         Kind.RECORDED, Kind.RECORDED, with_sorted_loops),
    Pass("sinks", "Takes attention with sinks, which models write out, together in one call.",
         Kind.RECORDED, Kind.RECORDED, with_sinks),
    Pass("constant-masks", "Takes out masks that hold for every batch of these shapes.",
         Kind.RECORDED, Kind.RECORDED, with_known_masks),
)  # fmt: skip
# Of the recording of a part, which `in_parts` takes with what is found of the whole batch.
KEYED: Final = (
    Pass(
        "key-draws", "Keys random draws by samples, so that any split of a batch draws alike.",
        Kind.RECORDED, Kind.RECORDED, with_keys,
    ),
)  # fmt: skip
PARTS: Final = (
    Pass("split-batch", "Writes the loss of a part so that the parts' add up to the batch's.",
         Kind.RECORDED, Kind.PART, in_parts),
    Pass("scaled-products", "Where the precision says so: products with weights in float8.",
         Kind.PART, Kind.PART, lambda split, *_: with_scaled_products(split)),
)  # fmt: skip
# Before it is decided how values are split over tp.
HEADED: Final = (
    Pass(
        "sorted-rows", "Counts experts' rows for their products apart; equal calls in one form.",
        Kind.PART, Kind.PART, lambda graph, *_: with_sorted_forms(graph),
    ),
    Pass(
        "separate-heads", "Gives each query head of a grouped attention its own key and value.",
        Kind.PART, Kind.PART, lambda graph, tp, gathered: separate_heads(graph, tp),
    ),
    Pass(
        "gather-products", "Gathers products of which no other dim can be split over tp.",
        Kind.PART, Kind.PART, _gather,
    ),
)  # fmt: skip
CUT: Final = (
    Pass(
        "split-stages", "Gives each pipeline stage its own graph.",
        Kind.PART, Kind.STAGE, split_stages,
    ),
)  # fmt: skip
LOCAL: Final = (
    Pass(
        "spmd-partition", "Gives a lane its parts of values, with the collectives between them.",
        Kind.STAGE, Kind.LOCAL,
        lambda graph, at: spmd_partition(graph, at.stages.sharding, at.lane),
    ),
    Pass(
        "sub-batches", "Divides a micro-batch so that one part computes while another waits.",
        Kind.LOCAL, Kind.LOCAL, _divide,
    ),
    Pass(
        "fuse-products", "Puts products and the collective beside them in one op.",
        Kind.LOCAL, Kind.LOCAL, _fuse,
    ),
    Pass(
        "chunk-rows", "Computes products beside collectives in chunks of rows.",
        Kind.LOCAL, Kind.LOCAL, _chunk_rows,
    ),
    Pass("grouped-heads", "Attends to shared keys and values without a copy for each query head.",
         Kind.LOCAL, Kind.LOCAL, lambda local, at: with_grouped_heads(local)),
    Pass("loss-in-blocks", "Computes losses of many classes without all scores at once.",
         Kind.LOCAL, Kind.LOCAL, lambda local, at: without_scores(local)),
    Pass(
        "activations", "Call by call: GELU and SiLU that a model writes out as torch's own.",
        Kind.LOCAL, Kind.LOCAL, lambda local, at: local if at.compiled else with_activations(local),
    ),
)  # fmt: skip
AUTODIFF: Final = (
    Pass(
        "differentiate", "Traces the backward behind the forward.",
        Kind.LOCAL, Kind.JOINT, lambda graph, *_: joint_graph(graph),
    ),
    Pass(
        "simplify", "Merges equal calls and removes those that do nothing.",
        Kind.JOINT, Kind.JOINT, lambda graph, *_: simplify(graph),
    ),
    Pass(
        "fewer-passes", "Rewrites arithmetic that reads and writes tensors more often than needed.",
        Kind.JOINT, Kind.JOINT, lambda graph, *_: fewer_passes(graph),
    ),
    Pass(
        "partition", "Parts forward and backward, with the saved values between them.",
        Kind.JOINT, Kind.PIECES, lambda graph, *_: partition(without_rows(graph)),
    ),
)  # fmt: skip
PIECES: Final = (
    Pass(
        "freeze", "Where the model is not trained: no input requires a gradient.",
        Kind.LOCAL, Kind.LOCAL, _freeze,
    ),
    *AUTODIFF,
    Pass(
        "rematerialise", "In kernels: keeps less, and makes the rest again in the backward's.",
        Kind.PIECES, Kind.PIECES,
        lambda stage, at: rematerialised(stage) if at.compiled else stage,
    ),
    Pass(
        "loss-gradient", "Call by call: the gradient of cross-entropy without a matrix of zeros.",
        Kind.PIECES, Kind.PIECES,
        lambda stage, at: stage if at.compiled else without_zeros(stage),
    ),
    Pass(
        "batch-statistics", "Call by call: those of a batch norm by the call that normalises.",
        Kind.PIECES, Kind.PIECES,
        lambda stage, at: stage if at.compiled else with_statistics(stage),
    ),
    Pass(
        "recompute-cheap", "Call by call: makes again what costs next to nothing.",
        Kind.PIECES, Kind.PIECES, lambda stage, at: stage if at.compiled else lean(stage),
    ),
    Pass(
        "recompute", "Where the plan says so: the backward makes blocks again right before it.",
        Kind.PIECES, Kind.PIECES, _recompute,
    ),
    Pass(
        "split-backward", "Where the schedule says so: input and weight gradients apart.",
        Kind.PIECES, Kind.PIECES, _split_backward,
    ),
    Pass(
        "checkpoint", "Where the schedule recomputes: a forward that saves what the plan says.",
        Kind.PIECES, Kind.PIECES, _checkpoint,
    ),
    Pass(
        "overlap", "Starts collectives early and waits late, with computation in between.",
        Kind.PIECES, Kind.PIECES, _overlap,
    ),
    Pass(
        "offload", "Where the plan says so: saved values leave for the host, and come back.",
        Kind.PIECES, Kind.PIECES, _offload,
    ),
    Pass(
        "onednn", "On CPUs: larger products of float32 by oneDNN.",
        Kind.PIECES, Kind.PIECES, lambda stage, at: by_onednn(stage) if at.onednn else stage,
    ),
)  # fmt: skip
STAGE: Final = (*LOCAL, *PIECES)
ORDERED: Final = (
    Pass(
        "programs", "Writes the actions of every rank, with the messages between stages.",
        Kind.STAGE, Kind.PROGRAMS, _programs,
    ),
)  # fmt: skip
PLACED: Final = (
    Pass(
        "dp-collectives", "Places the collectives over dp in the actions that they run under.",
        Kind.PROGRAMS, Kind.PROGRAMS, placed_collectives,
    ),
)  # fmt: skip
PIPELINE: Final = (
    *RECORDED, *KEYED, *PARTS, *HEADED, *CUT, *STAGE, *ORDERED, *PLACED,
)  # fmt: skip


def called_pieces(local: Graph) -> StageGraphs:
    """Forward and backward of a stage whose calls run one by one, before blocks are recomputed."""
    return lean(with_statistics(without_zeros(differentiate(local))))


@dataclass(frozen=True, slots=True)
class PiecesOf:
    """Makes the pieces of a stage from its forward: what its blocks do not keep (`kept`, for which
    `recompute` may stand) the backward makes again. Perhaps with the backward `split` beside the
    whole one, and a `checkpoint` of at most `keep_bytes` on one of `tp` x `cp`. For `Graph.told`.
    """

    recompute: str = "none"
    kept: str = ""
    split: bool = False
    checkpoint: bool = False
    keep_bytes: int = 0
    tp: int = 1
    cp: int = 1

    def __call__(self, local: Graph) -> StageGraphs:
        """The pieces, of calls that run one by one."""
        stage = _made_again(local.told(called_pieces), self.recompute, self.kept)
        stage = _split(stage) if self.split else stage
        if not self.checkpoint or stage.backward is None:
            return stage
        return _with_checkpoint(stage, self.keep_bytes, self.tp, self.cp)


def differentiate(graph: Graph) -> StageGraphs:
    """Forward and backward of a graph, by the passes of `AUTODIFF` alone."""
    stage: StageGraphs = run_passes(AUTODIFF, graph)
    return stage
