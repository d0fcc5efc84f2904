"""What the blocks of a plan's stages keep: priced by the very graphs that are run."""

from __future__ import annotations

from dataclasses import replace

from merakc.costs.device import Place
from merakc.costs.stage import reduced_bytes, stage_cost, static_bytes
from merakc.ir.costs import StageCost
from merakc.ir.graph import Graph
from merakc.ir.program import ActionKind
from merakc.lowering.lowered import Lowered
from merakc.passes.autodiff.shorten import graph_form
from merakc.passes.pipeline import PiecesOf, offload_place, offloaded


def recomputed_costs(lowered: Lowered, places: list[Place]) -> list[StageCost]:
    """The costs of the stages, each at its place, from their own graphs; stages that are alike are
    differentiated once.
    """
    plan, found = lowered.plan, []
    first: dict[object, Graph] = {}
    for stage, (local, place) in enumerate(zip(lowered.stages.local, places, strict=True)):
        like = first.setdefault(graph_form(local)[0], local)
        split = ActionKind.INPUT_GRAD in lowered.options(stage, 0).kinds
        kept = plan.kept_blocks[stage] if plan.kept_blocks else ""
        pieces_of = PiecesOf(plan.recompute, kept, split)
        pieces = like.told(pieces_of)
        if plan.host_activations and pieces.backward is not None:
            moved = offloaded(pieces, plan.host_activations[stage], offload_place(plan))
            cost = stage_cost(moved, place, in_buckets=plan.has_buckets)
        else:
            cost = like.told(_cost, pieces_of, place, plan.has_buckets)
        state = plan.shards(stage), plan.precision, plan.tied_shards(stage), plan.host_states
        found.append(
            replace(
                cost,
                static_bytes=static_bytes(local, *state),
                reduced_bytes=reduced_bytes(local, *state),
            )
        )
    return found


def _cost(local: Graph, pieces_of: PiecesOf, place: Place, in_buckets: bool) -> StageCost:
    """The cost of a stage's pieces; its state is that of an unsharded one."""
    return stage_cost(local.told(pieces_of), place, in_buckets=in_buckets)
