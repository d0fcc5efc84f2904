"""What the computes of a plan's stages cost: priced by the very graphs that are run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from merakc.costs.device import Place
from merakc.costs.stage import reduced_bytes, stage_cost, static_bytes
from merakc.ir.costs import StageCost
from merakc.ir.graph import Graph
from merakc.ir.plan import Plan
from merakc.ir.program import ActionKind
from merakc.ir.recompute import IN_BACKWARD
from merakc.lowering.lowered import Lowered
from merakc.passes.autodiff.shorten import graph_form
from merakc.passes.pipeline import PiecesOf, offload_place, offloaded


def graph_costs(lowered: Lowered, places: Sequence[Place]) -> list[StageCost]:
    """The costs of the stages, each at its place, from their own graphs; stages that are alike are
    differentiated once.

    Backwards are priced whole and split, and forwards with a recomputation too where the plan's
    blocks are not made again as it is: whatever the order of work has, and others might have.
    """
    plan, found = lowered.plan, []
    first: dict[object, Graph] = {}
    for stage, (local, place) in enumerate(zip(lowered.stages.local, places, strict=True)):
        like = first.setdefault(local.told(graph_form)[0], local)
        if plan.host_activations:
            cost = _moved_cost(lowered, stage, like, place)
        else:
            cost = like.told(_cost, _pieces_of(plan, stage), place, plan.has_buckets)
        state = plan.shards(stage), plan.precision, plan.tied_shards(stage), plan.host_states
        found.append(
            replace(
                cost,
                static_bytes=static_bytes(local, *state),
                reduced_bytes=reduced_bytes(local, *state),
            )
        )
    return found


def _pieces_of(plan: Plan, stage: int) -> PiecesOf:
    if plan.recompute in IN_BACKWARD:
        kept = plan.kept_blocks[stage] if plan.kept_blocks else ""
        return PiecesOf(plan.recompute, kept, split=True)
    keep_bytes = max(plan.keep_bytes[stage], 0) if plan.keep_bytes else 0
    return PiecesOf(split=True, checkpoint=True, keep_bytes=keep_bytes, tp=plan.tp)


def _moved_cost(lowered: Lowered, stage: int, local: Graph, place: Place) -> StageCost:
    """The cost of a stage of which some values wait on the host: what moves is chosen for the
    pieces that are run, and for no others.
    """
    plan = lowered.plan
    kinds = lowered.options(stage, 0).kinds
    pieces = local.told(
        replace(_pieces_of(plan, stage), split=ActionKind.INPUT_GRAD in kinds, checkpoint=False)
    )
    if pieces.backward is not None:
        pieces = offloaded(pieces, plan.host_activations[stage], offload_place(plan))
    return stage_cost(pieces, place, in_buckets=plan.has_buckets)


def _cost(local: Graph, pieces_of: PiecesOf, place: Place, in_buckets: bool) -> StageCost:
    """The cost of a stage's pieces; its state is that of an unsharded one."""
    return stage_cost(local.told(pieces_of), place, in_buckets=in_buckets)
