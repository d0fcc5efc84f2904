"""The seconds of a step from the pieces of a model: in milliseconds, with no graph of any stage.

What thousands of candidates are compared by. The orders of work are those that the runtime runs;
only their costs come from pieces in place of the stages' own graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from merakc.cluster import Hardware
from merakc.costs.device import Place, traffic_seconds
from merakc.costs.fabric import Group, all_reduce_seconds, message_seconds
from merakc.costs.measured import NONE, Corrections
from merakc.costs.pieces import Piece
from merakc.costs.stages import (
    PieceCost,
    even_stages,
    piece_cost,
    rank_place,
    shared_parameters,
    stage_costs,
    stage_parameters,
)
from merakc.costs.state import MIXED, DpGroup, Layer, Precision, state_cost
from merakc.ir.costs import StageCost
from merakc.ir.state import UNSHARDED, StateShards
from merakc.schedules.registry import make_schedule
from merakc.schedules.timing import make_pipeline, peak_bytes, run_orders
from merakc.schedules.work import Work, encode


@dataclass(frozen=True, slots=True)
class Degrees:
    """How a job is laid out: degrees, stages a pipeline rank, micro-batches of a dp rank.

    `inner` is the axis whose neighbours are closer, after those of tp: pipeline ranks (as
    `merakc.ir.program.Mesh` has them) or dp ranks (as Megatron-LM has them).
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    micro_batches: int = 1
    chunks: int = 1
    inner: Literal["pp", "dp"] = "pp"

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp * self.pp

    @property
    def dp_stride(self) -> int:
        """How far apart neighbours of the dp axis are."""
        return self.tp * (self.pp if self.inner == "pp" else 1)

    @property
    def pp_stride(self) -> int:
        """How far apart neighbours of the pp axis are."""
        return self.tp * (self.dp if self.inner == "dp" else 1)


@dataclass(frozen=True, slots=True)
class Habits:
    """What else of a program's ways its step depends on.

    `overlap` is the share of its speed at which communication of gradients and parameters runs
    under computing; 0 waits for all of it. With `split_messages` each tp rank sends its part of a
    message alone, and the parts are gathered in the node (Narayanan et al. 2021, section 4.1). With
    `tp_overlap` the collectives of tp run beside the products that they belong to.
    """

    recompute: Literal["none", "full"] = "none"
    shards: StateShards = UNSHARDED
    precision: Precision = MIXED
    overlap: float = 0.0
    split_messages: bool = False
    tp_overlap: bool = False


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of a step, and what they are made of; peak bytes of each pipeline rank.

    `source` says whether measurements have told of the pieces, or formulas alone.
    """

    step_s: float
    pipeline_s: float
    state_s: float
    optimizer_s: float
    bubble_share: float
    peak_bytes: tuple[int, ...]
    stages: tuple[StageCost, ...] = field(repr=False)
    source: Literal["formula", "measured"] = "formula"


def estimate_step(
    pieces: Sequence[Piece],
    degrees: Degrees,
    hardware: Hardware,
    habits: Habits = Habits(),
    corrections: Corrections = NONE,
    labels: Callable[[Piece], Sequence[str]] = lambda piece: (),
) -> Estimate:
    """One step of a model on `degrees.ranks` neighbouring devices.

    `pieces` are of one tp rank and micro-batch; equal blocks may be one value many times. Blocks
    are spread evenly over the stages, which run 1F1B, interleaved where a rank has several. After
    it, gradients are reduced over dp and over the holders of shared parameters, and the optimizer
    runs.
    """
    place = rank_place(hardware, degrees.ranks, degrees.tp, overlap=habits.tp_overlap)
    known: dict[int, PieceCost] = {}
    for piece in pieces:
        if id(piece) not in known:
            known[id(piece)] = piece_cost(piece, place, corrections, labels(piece))
    costs = [known[id(piece)] for piece in pieces]
    parts = even_stages(pieces, degrees.pp * degrees.chunks)
    stages = stage_costs(
        pieces, costs, parts, place, shards=habits.shards, precision=habits.precision
    )
    pipeline_s, busy_s, peaks = _pipeline(pieces, parts, stages, degrees, habits, place)
    state_s, optimizer_s = _after(pieces, costs, parts, degrees, habits, place)
    return Estimate(
        pipeline_s + state_s + optimizer_s,
        pipeline_s,
        state_s,
        optimizer_s,
        1.0 - busy_s / pipeline_s,
        peaks,
        stages,
        "measured" if all(cost.measured for cost in known.values()) else "formula",
    )


def _pipeline(
    pieces: Sequence[Piece],
    parts: Sequence[Sequence[int]],
    stages: Sequence[StageCost],
    degrees: Degrees,
    habits: Habits,
    place: Place,
) -> tuple[float, float, tuple[int, ...]]:
    """Seconds of the micro-batches, the mean over ranks of the busy ones, peak bytes of ranks."""
    rank_of, orders = _orders(
        degrees.pp, degrees.micro_batches, degrees.chunks, habits.recompute == "full"
    )
    share = degrees.tp if habits.split_messages else 1
    links = [
        message_seconds(pieces[part[-1]].handed_bytes / share, degrees.pp_stride, place.fabric)
        for part in parts[:-1]
    ]
    pipeline = make_pipeline(rank_of, stages, degrees.micro_batches, links)
    ends = run_orders(pipeline, orders)
    assert ends is not None, "a known schedule ran into a deadlock"
    again = habits.recompute == "full"
    busy_s = degrees.micro_batches * sum(
        c.forward_s + c.backward_s + again * c.recompute_s for c in stages
    )
    peaks = tuple(peak_bytes(pipeline, rank, order) for rank, order in enumerate(orders))
    return max(end[-1] for end in ends), busy_s / degrees.pp, peaks


@lru_cache(maxsize=256)
def _orders(
    pp: int, micro_batches: int, chunks: int, recompute: bool
) -> tuple[tuple[int, ...], list[list[Work]]]:
    """The stages' ranks and the order of work of each rank."""
    schedule = make_schedule(
        "1f1b" if chunks == 1 else "interleaved-1f1b",
        pp,
        micro_batches,
        recompute="full" if recompute else "none",
        chunks=None if chunks == 1 else chunks,
    )
    return schedule.rank_of, encode(schedule)


def _after(
    pieces: Sequence[Piece],
    costs: Sequence[PieceCost],
    parts: Sequence[Sequence[int]],
    degrees: Degrees,
    habits: Habits,
    place: Place,
) -> tuple[float, float]:
    """Seconds that gradients and parameters are waited for, and those of the optimizer.

    The rank with the most parameters is waited for.
    """
    fabric, precision, shards = place.fabric, habits.precision, habits.shards
    ranks = [
        [k for stage in range(rank, len(parts), degrees.pp) for k in parts[stage]]
        for rank in range(degrees.pp)
    ]
    most = max(ranks, key=lambda own: stage_parameters([pieces[k] for k in own]))
    parameters = stage_parameters([pieces[k] for k in most])
    state_s = 0.0
    if degrees.dp > 1:
        layers = [
            Layer(pieces[k].parameter_count, costs[k].forward_s, costs[k].backward_s) for k in most
        ]
        # Only the first and the last micro-batch meet communication, unless each one does.
        met = degrees.micro_batches if shards.gradients > 1 else 1
        group = DpGroup(degrees.dp, fabric, degrees.dp_stride, habits.overlap)
        state_s = state_cost(layers, met, shards, group, precision).exposed_s
    shared = sum(shared_parameters(pieces, parts).values())
    if shared:
        ends = Group(2, 2 if degrees.ranks <= fabric.ranks_per_node else 1, fabric.ranks_per_node)
        state_s += all_reduce_seconds(precision.gradient_bytes * shared, ends, fabric)
    moved = 2 * precision.optimizer_bytes + precision.gradient_bytes + precision.parameter_bytes
    updated = -(-parameters // shards.optimizer)
    return state_s, traffic_seconds(moved * updated, place.device)
