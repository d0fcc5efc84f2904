"""What the computes of a plan's stages cost: priced by the very graphs that are run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from math import isclose

from merakc.costs.device import Place
from merakc.costs.stage import reduced_bytes, stage_cost, static_bytes
from merakc.costs.work.pieces import part_starts
from merakc.costs.work.sharded import read_at_once
from merakc.ir.costs import StageCost
from merakc.ir.graph import Graph
from merakc.ir.plan import Plan
from merakc.ir.program import ActionKind
from merakc.ir.recompute import IN_BACKWARD
from merakc.lowering.lowered import Lowered
from merakc.passes.autodiff.shorten import graph_form, shorten
from merakc.passes.pipeline import PiecesOf, with_moves

# The blocks by which long runs of them are told, and by how much the seconds that one more takes
# may differ.
FEW, SAME = (2, 3, 4), 1e-3


def graph_costs(lowered: Lowered, places: Sequence[Place]) -> list[StageCost]:
    """The costs of the stages, each at its place, from their own graphs; stages that are alike are
    differentiated once, and few blocks of many that are equal.

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
        if plan.recompute in IN_BACKWARD and plan.has_collectives:
            cost = replace(cost, read_bytes=like.told(_read_bytes, _pieces_of(plan, stage)))
        state = plan.shards(stage), plan.precision, plan.other_shards(stage), plan.on_host
        found.append(
            replace(
                cost,
                static_bytes=static_bytes(local, *state, read_bytes=cost.read_bytes),
                reduced_bytes=reduced_bytes(local, *state),
            )
        )
    return found


def _read_bytes(local: Graph, pieces_of: PiecesOf) -> int:
    """What the backward has in use of parameters at once."""
    backward = local.told(pieces_of).backward
    return 0 if backward is None else read_at_once(backward)


def _pieces_of(plan: Plan, stage: int) -> PiecesOf:
    if plan.recompute in IN_BACKWARD:
        kept = plan.kept_blocks[stage] if plan.kept_blocks else ""
        return PiecesOf(plan.recompute, kept, split=True)
    keep_bytes = max(plan.keep_bytes[stage], 0) if plan.keep_bytes else 0
    return PiecesOf(split=True, checkpoint=True, keep_bytes=keep_bytes, tp=plan.tp, cp=plan.cp)


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
        pieces = with_moves(pieces, plan, stage)
    return stage_cost(pieces, place, in_buckets=plan.has_buckets)


def _cost(local: Graph, pieces_of: PiecesOf, place: Place, in_buckets: bool) -> StageCost:
    """The cost of a stage's pieces; its state is that of an unsharded one.

    Of long runs of equal blocks of which nothing is made again it is told by two, three and four of
    them, where each that is more costs as much as the one before.
    """

    def own(graph: Graph) -> StageCost:
        return stage_cost(graph.told(pieces_of), place, in_buckets=in_buckets)

    is_plain = pieces_of.recompute == "none" and not pieces_of.keep_bytes
    shorter = local.told(_shorter) if is_plain else None
    if shorter is None:
        return own(local)
    graphs, left = shorter
    few, some, many = (asdict(own(graph)) for graph in graphs)
    each = {name: many[name] - some[name] for name in many}
    if not all(_as_much(each[name], some[name] - few[name]) for name in many):
        return own(local)
    return StageCost(**{name: many[name] + left * each[name] for name in many})


def _shorter(local: Graph) -> tuple[tuple[Graph, ...], int] | None:
    """The graph with so few blocks of its runs of equal ones as `FEW` says, and how many are left
    out of the last; None where runs are of different lengths, or so short that it does not pay.
    """
    starts = part_starts(local)
    made = [shorten(local, starts, keep) for keep in FEW]
    graphs, (*_, counts) = zip(*made, strict=True)
    left = {count - 1 for count in counts if count > 1}
    if len(left) != 1 or 2 * sum(len(graph.nodes) for graph in graphs) > len(local.nodes):
        return None
    return graphs, left.pop()


def _as_much(more: float, before: float) -> bool:
    """Whether a block adds as much as the one before. Bytes have to be the same; seconds hardly
    differ, since launches are hidden a little better the longer a graph is.
    """
    return more == before or (isinstance(more, float) and isclose(more, before, rel_tol=SAME))
