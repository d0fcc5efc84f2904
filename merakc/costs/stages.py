"""Stage costs from pieces: what a pipeline's stages take on given devices and links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from merakc.costs.device import (
    Place,
    backward_seconds,
    forward_seconds,
    traffic_seconds,
    work_seconds,
)
from merakc.costs.measured import NONE, Corrections
from merakc.costs.state import MIXED, Layer, Precision, state_bytes
from merakc.costs.work.pieces import Piece
from merakc.ir.costs import StageCost
from merakc.ir.state import UNSHARDED, StateShards


@dataclass(frozen=True, slots=True)
class PieceCost:
    """A piece's seconds, those of its backward that no earlier piece waits for, and whether a
    measurement has told of them.
    """

    forward_s: float
    backward_s: float
    measured: bool = False
    weight_grad_s: float = 0.0


def piece_cost(
    piece: Piece, place: Place, corrections: Corrections = NONE, labels: Sequence[str] = ()
) -> PieceCost:
    """The seconds of a piece, corrected where its labels were measured."""
    factor = corrections.factor(labels)
    return PieceCost(
        factor * forward_seconds(piece.work, place),
        factor * backward_seconds(piece.work, place),
        corrections.is_measured(labels),
        factor * work_seconds(piece.work.weight_grad, place, place.factors.backward),
    )


def even_stages(
    pieces: Sequence[Piece], costs: Sequence[PieceCost], stages: int
) -> list[list[int]]:
    """The places of the pieces of each stage: blocks spread evenly, all else beside them.

    What lies before a block goes with it, what comes after the last with the last.
    """
    blocks = [k for k, piece in enumerate(pieces) if piece.path]
    found: list[list[int]] = [[] for _ in range(stages)]
    before = 0
    for k in range(len(pieces)):
        at = min(before, len(blocks) - 1) * stages // max(len(blocks), 1)
        found[max(at, 0)].append(k)
        before += bool(pieces[k].path)
    return found


def balanced_stages(costs: Sequence[Sequence[PieceCost]]) -> list[list[int]]:
    """The places of the pieces of each stage, so that the longest stage is as short as it can be.

    `costs` are those of all pieces, on the device of each stage. Stages are runs of pieces, none
    empty. Dynamic programming over prefix sums: the shortest longest stage of the first k pieces
    in n stages, for all k and n.
    """
    stages, pieces = len(costs), len(costs[0])
    assert stages <= pieces, f"{stages} stages of {pieces} pieces"
    spans = {id(own): _spans(own) for own in {id(own): own for own in costs}.values()}
    best, firsts = spans[id(costs[0])][0], []
    for own in costs[1:]:
        longest = np.maximum(best[:, None], spans[id(own)])
        firsts.append(longest.argmin(0))
        best = longest.min(0)
    ends = [pieces]
    for first in reversed(firsts):
        ends.insert(0, int(first[ends[0]]))
    return [list(range(a, b)) for a, b in pairwise([0, *ends])]


def _spans(costs: Sequence[PieceCost]) -> npt.NDArray[np.float64]:
    """The seconds of each run of pieces, [first, behind the last]; infinite of none."""
    seconds = np.array([cost.forward_s + cost.backward_s for cost in costs])
    sums = np.concatenate([[0.0], np.cumsum(seconds)])
    spans: npt.NDArray[np.float64] = sums[None, :] - sums[:, None]
    spans[np.tril_indices(len(sums))] = np.inf
    return spans


def stage_costs(
    pieces: Sequence[Piece],
    costs: Sequence[PieceCost],
    stages: Sequence[Sequence[int]],
    place: Place,
    *,
    shards: StateShards = UNSHARDED,
    precision: Precision = MIXED,
    stagewise: bool = False,
    gradients: bool = False,
) -> tuple[StageCost, ...]:
    """The cost of each stage, of the pieces at the places that it has.

    The gradients of a micro-batch are added to those of the ones before it. A recomputation runs
    the blocks again, and keeps what enters each of them. With `stagewise`, as in merakc's runtime,
    products add to gradients as they write them (`merakc.analysis.accumulation`), and a
    recomputation runs all again, and keeps what enters the stage. With `gradients` a backward holds
    those of its largest call.
    """
    found = []
    for stage in stages:
        own = [pieces[k] for k in stage]
        blocks = [k for k in stage if pieces[k].path]
        parameters = stage_parameters(own)
        added = (precision.parameter_bytes + 2 * precision.gradient_bytes) * parameters
        added_s = 0.0 if stagewise else traffic_seconds(added, place.device)
        backward_s = sum(costs[k].backward_s for k in stage) + added_s
        entering = sum(pieces[k - 1].handed_bytes for k in blocks if k)
        rest = sum(pieces[k].saved_bytes for k in stage if k not in blocks)
        largest = max((pieces[k].saved_bytes for k in blocks), default=0)
        if stagewise:
            blocks, rest, largest = list(stage), 0, 0
            entering = pieces[stage[0] - 1].handed_bytes if stage[0] else 0
        # Where a stage receives nothing, nobody waits for gradients.
        weight_grad_s = sum(costs[k].weight_grad_s for k in stage) + added_s
        weight_grad_s = min(weight_grad_s, backward_s) if stage[0] else backward_s
        peak_bytes = max(p.gradient_bytes for p in own) if gradients else 0
        found.append(
            StageCost(
                forward_s=sum(costs[k].forward_s for k in stage),
                backward_s=backward_s,
                input_grad_s=backward_s - weight_grad_s,
                weight_grad_s=weight_grad_s,
                deferred_bytes=sum(p.deferred_bytes if stage[0] else p.saved_bytes for p in own),
                recompute_s=sum(costs[k].forward_s for k in blocks),
                saved_bytes=sum(piece.saved_bytes for piece in own),
                checkpoint_bytes=entering + rest,
                recompute_peak_bytes=largest,
                backward_peak_bytes=peak_bytes,
                input_grad_peak_bytes=peak_bytes,
                static_bytes=state_bytes(parameters, shards, precision),
            )
        )
    return tuple(found)


def stage_parameters(pieces: Sequence[Piece], *, of_experts: bool | None = None) -> int:
    """Trained elements of pieces, those of a shared parameter once; if it is said, of experts alone
    or of others.
    """
    unique, names = {id(p): p for p in pieces}, dict[str, int]()
    own = {
        key: {m: n for m, n in p.parameters.items() if of_experts in (None, m in p.experts)}
        for key, p in unique.items()
    }
    for parameters in own.values():
        names |= parameters
    repeats = Counter(map(id, pieces))
    again = {k: sum(n for m, n in own[k].items() if m not in p.shared) for k, p in unique.items()}
    return sum(names.values()) + sum((n - 1) * again[key] for key, n in repeats.items())


def layers_of(pieces: Sequence[Piece], costs: Sequence[PieceCost]) -> list[Layer]:
    """The pieces of a rank, each with all its parameters, those of its experts first."""
    found = []
    for piece, cost in zip(pieces, costs, strict=True):
        own = sum(piece.parameters[name] for name in piece.experts)
        if own:
            found.append(Layer(own, 0.0, 0.0, of_experts=True))
        found.append(Layer(piece.parameter_count - own, cost.forward_s, cost.backward_s))
    return found


def parameter_layers(pieces: Sequence[Piece], costs: Sequence[PieceCost]) -> list[Layer]:
    """Each parameter of a rank, in the order of their first use, with its part of the seconds of
    its piece, by elements; pieces that bring none are layers of no parameters.
    """
    found: list[Layer] = []
    holder: dict[str, int] = {}
    for piece, cost in zip(pieces, costs, strict=True):
        # Equal blocks may be one value with the names of the first.
        own = [(n, name in piece.experts) for name, n in piece.parameters.items()
               if holder.setdefault(name, id(piece)) == id(piece)] or [(0, False)]  # fmt: skip
        total = sum(n for n, _ in own)
        shares = [n / total for n, _ in own] if total else [1.0] + [0.0] * (len(own) - 1)
        found += [Layer(n, s * cost.forward_s, s * cost.backward_s, of_experts)
                  for (n, of_experts), s in zip(own, shares, strict=True)]  # fmt: skip
    return found


def shared_parameters(
    pieces: Sequence[Piece], stages: Sequence[Sequence[int]]
) -> Mapping[str, int]:
    """The parameters that several stages hold, by name: their gradients are added up."""
    holders: Counter[str] = Counter()
    sizes: dict[str, int] = {}
    for stage in stages:
        held = {id(pieces[k]): pieces[k] for k in stage}.values()
        # Blocks that are alike are one piece, so that other names of theirs tell nothing.
        every = ((p, name, n) for p in held for name, n in p.parameters.items())
        names = {name: n for p, name, n in every if not p.path or name in p.shared}
        sizes |= names
        holders.update(names.keys())
    return {name: sizes[name] for name, count in holders.items() if count > 1}


def optimizer_seconds(updated: int, precision: Precision, place: Place) -> float:
    """Seconds of an optimizer that updates so many elements: it reads and writes its state, reads
    the gradients and writes the parameters. Corrected by measured steps.
    """
    moved = 2 * precision.optimizer_bytes + precision.gradient_bytes + precision.parameter_bytes
    return place.factors.optimizer * traffic_seconds(moved * updated, place.device)
