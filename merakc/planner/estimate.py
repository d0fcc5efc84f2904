"""The seconds of a step from the pieces of a model: in milliseconds, with no graph of any stage.

What thousands of candidates are compared by. The orders of work are those that the runtime runs;
only their costs come from pieces in place of the stages' own graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from merakc.costs.device import Place, rank_place
from merakc.costs.fabric import Group, all_reduce_seconds, message_seconds
from merakc.costs.measured import NONE, Corrections
from merakc.costs.ranks import rank_devices
from merakc.costs.stages import (
    PieceCost,
    balanced_stages,
    even_stages,
    optimizer_seconds,
    piece_cost,
    shared_parameters,
    stage_costs,
    stage_parameters,
)
from merakc.costs.state import (
    MIXED,
    DpGroup,
    Layer,
    Precision,
    in_buckets,
    state_bytes,
    state_cost,
)
from merakc.costs.work import keep
from merakc.costs.work.pieces import Piece
from merakc.ir.costs import StageCost
from merakc.ir.program import Inner, Mesh
from merakc.ir.state import UNSHARDED, StateShards
from merakc.machines.cluster import Device, Hardware, Sharing
from merakc.schedules.bound import lower_bound_s
from merakc.schedules.known_orders import KnownOrders, known_orders
from merakc.schedules.registry import stage_ranks
from merakc.schedules.timing import make_pipeline, run_orders

Recompute = Literal["none", "full", "solved", "blocks", "budget"]
# So many times the pipeline ranks, and so many micro-batches of one rank, are simulated; what a
# further one takes is what the last of them took.
STEADY = 4


@dataclass(frozen=True, slots=True)
class Degrees:
    """How a job is laid out: degrees, stages a pipeline rank, micro-batches of a dp rank.

    `schedule` is one of `merakc.schedules.registry`; of several stages a rank, 1F1B is interleaved.
    `inner` is the axis whose neighbours are closer, after those of tp: pipeline ranks (as
    `merakc.ir.program.Mesh` has them) or dp ranks (as Megatron-LM has them).
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    micro_batches: int = 1
    chunks: int = 1
    inner: Inner = "pp"
    schedule: str = "1f1b"

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp * self.pp

    @property
    def mesh(self) -> Mesh:
        """The ranks."""
        return Mesh(self.dp, self.tp, self.pp, self.inner)


@dataclass(frozen=True, slots=True)
class Habits:
    """What else of a program's ways its step depends on.

    With `recompute` "solved" each stage recomputes what its rank's memory does not hold, "budget"
    does so block by block in its own backwards, "blocks" all of it. With `stagewise`, as our
    runtime has it, the longest stage is as short as it can be, and recomputed from what it has
    received; without, blocks are spread evenly, each recomputed from what enters it. `overlap` is
    the share of its speed at which communication of gradients and parameters runs under computing;
    0 waits for all of it. With `split_messages` each tp rank sends its part of a message alone, and
    the parts are gathered in the node (Narayanan et al. 2021, section 4.1). With `tp_overlap` the
    collectives of tp run beside the products that they belong to. With `whole_batch` backwards wait
    for all forwards, as a loss that couples samples makes them.
    """

    recompute: Recompute = "none"
    shards: StateShards = UNSHARDED
    precision: Precision = MIXED
    overlap: float = 0.0
    split_messages: bool = False
    tp_overlap: bool = False
    stagewise: bool = False
    whole_batch: bool = False


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of a step, and what they are made of; peak bytes of each pipeline rank.

    `recompute_s` are a rank's on average.

    `source` says whether measurements have told of the pieces, or formulas alone.
    """

    step_s: float
    pipeline_s: float
    state_s: float
    optimizer_s: float
    bubble_share: float
    recompute_s: float
    peak_bytes: tuple[int, ...]
    stages: tuple[StageCost, ...] = field(repr=False)
    source: Literal["formula", "measured"] = "formula"


@dataclass(frozen=True)
class Job:
    """A model's pieces on the stages of a layout, with their seconds.

    `places` and `costs`, those of all pieces there, are each pipeline rank's; `parts` are the
    places of each stage's pieces. `sharing` is what the ranks of a node share.
    """

    pieces: Sequence[Piece]
    degrees: Degrees
    places: Sequence[Place]
    costs: Sequence[Sequence[PieceCost]]
    parts: Sequence[Sequence[int]]
    sharing: Sharing | None = None

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """The pipeline rank of each stage."""
        return rank_of(self.degrees)

    @property
    def links(self) -> Place:
        """Any rank's place, for the links that all have alike."""
        return self.places[0]

    @cached_property
    def rank_pieces(self) -> list[list[int]]:
        """The places of each pipeline rank's pieces."""
        found: list[list[int]] = [[] for _ in range(self.degrees.pp)]
        for part, rank in zip(self.parts, self.rank_of, strict=True):
            found[rank] += part
        return found

    @cached_property
    def rank_parameters(self) -> list[int]:
        """The trained elements of each pipeline rank."""
        return [stage_parameters([self.pieces[k] for k in own]) for own in self.rank_pieces]

    @cached_property
    def stage_parameters(self) -> list[int]:
        """The trained elements of each stage."""
        return [stage_parameters([self.pieces[k] for k in part]) for part in self.parts]

    @cached_property
    def _stages(self) -> dict[tuple[Precision, bool], list[StageCost]]:
        return {}

    def stages(self, habits: Habits) -> list[StageCost]:
        """The costs of the stages, of which only the bytes of their state depend on the shards."""
        key = habits.precision, habits.stagewise
        if key not in self._stages:
            self._stages[key] = [
                cost
                for part, rank in zip(self.parts, self.rank_of, strict=True)
                for cost in stage_costs(
                    self.pieces, self.costs[rank], [part], self.places[rank],
                    precision=habits.precision, stagewise=habits.stagewise,
                )
            ]  # fmt: skip
        return [
            replace(cost, static_bytes=state_bytes(count, habits.shards, habits.precision))
            for cost, count in zip(self._stages[key], self.stage_parameters, strict=True)
        ]

    def state_bytes(self, shards: StateShards, precision: Precision) -> list[int]:
        """What each pipeline rank holds between two steps."""
        return [state_bytes(count, shards, precision) for count in self.rank_parameters]


def make_job(
    pieces: Sequence[Piece],
    degrees: Degrees,
    hardware: Hardware,
    habits: Habits = Habits(),
    corrections: Corrections = NONE,
    labels: Callable[[Piece], Sequence[str]] = lambda piece: (),
) -> Job:
    """Times pieces on `degrees.ranks` neighbouring devices and spreads them over stages.

    `pieces` are of one tp rank and micro-batch; equal blocks may be one value many times.
    """
    devices = rank_devices(hardware, degrees.mesh)
    places = {
        device: rank_place(
            hardware, degrees.ranks, degrees.tp, overlap=habits.tp_overlap, device=device
        )
        for device in dict.fromkeys(devices)
    }
    costs: dict[Device, list[PieceCost]] = {}
    unique = {id(piece): piece for piece in pieces}
    for device, place in places.items():
        known = {k: piece_cost(p, place, corrections, labels(p)) for k, p in unique.items()}
        costs[device] = [known[id(piece)] for piece in pieces]
    on_ranks = [costs[device] for device in devices]
    if habits.stagewise:
        parts = balanced_stages([on_ranks[rank] for rank in rank_of(degrees)])
    else:
        parts = even_stages(pieces, (), degrees.pp * degrees.chunks)
    of_ranks = [places[device] for device in devices]
    return Job(pieces, degrees, of_ranks, on_ranks, parts, hardware.sharing)


def estimate_step(
    pieces: Sequence[Piece],
    degrees: Degrees,
    hardware: Hardware,
    habits: Habits = Habits(),
    corrections: Corrections = NONE,
    labels: Callable[[Piece], Sequence[str]] = lambda piece: (),
) -> Estimate:
    """One step of a model, as `make_job` lays it out."""
    return estimate_job(make_job(pieces, degrees, hardware, habits, corrections, labels), habits)


def estimate_job(job: Job, habits: Habits, of_state: tuple[float, float] | None = None) -> Estimate:
    """One step: the micro-batches in the order of the schedule; after them gradients are reduced
    over dp and over the holders of shared parameters, and the optimizer runs.

    `of_state` are the `state_seconds`, where they are known.
    """
    stages = job.stages(habits)
    run = _run(job, stages, habits)
    state_s, optimizer_s = of_state or state_seconds(job, habits)
    pipeline_s, busy_s, sharing = run.seconds, run.busy_s, job.sharing
    if sharing is not None:  # all that ranks of a node do, they do with what they share
        together = min(job.degrees.ranks, sharing.devices)
        busy_s *= together / sharing.most(together)
        pipeline_s = max(pipeline_s, busy_s)
    return Estimate(
        pipeline_s + state_s + optimizer_s,
        pipeline_s,
        state_s,
        optimizer_s,
        1.0 - busy_s / pipeline_s,
        run.again_s,
        run.peak_bytes,
        tuple(stages),
        "measured" if all(cost.measured for cost in job.costs[0]) else "formula",
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """The micro-batches of a step: seconds, those that a rank is busy and recomputes on average,
    peak bytes of each.
    """

    seconds: float
    busy_s: float
    again_s: float
    peak_bytes: tuple[int, ...]


def least_seconds(job: Job, habits: Habits) -> float:
    """Seconds of a step's micro-batches at the least: in any order of work on these stages, with
    the least recomputation, whatever the shards of the state.
    """
    costs = [replace(cost, static_bytes=0) for cost in job.stages(habits)]
    memory = [place.device.memory_bytes for place in job.places]
    links = _links(job, habits)
    pipeline = make_pipeline(job.rank_of, costs, job.degrees.micro_batches, links)
    return lower_bound_s(pipeline, memory)


def _links(job: Job, habits: Habits) -> list[float]:
    """Seconds of a message from each stage to the next."""
    degrees, fabric = job.degrees, job.links.fabric
    share = degrees.tp if habits.split_messages else 1
    return [
        message_seconds(job.pieces[part[-1]].handed_bytes / share, degrees.mesh.pp_stride, fabric)
        for part in job.parts[:-1]
    ]


def _run(job: Job, stages: Sequence[StageCost], habits: Habits) -> _Run:
    """Runs so many micro-batches that the rest of them take as long each as the last ones."""
    degrees, links = job.degrees, _links(job, habits)
    period, total = degrees.pp, degrees.micro_batches
    left = max(total - STEADY * period, 0) // period * period
    if habits.whole_batch:  # all are in memory at once
        left = 0
    memory = [place.device.memory_bytes for place in job.places]
    again: tuple[int, ...] = ()
    if habits.recompute == "full":
        again = tuple(range(len(stages)))
    elif habits.recompute in ("blocks", "budget"):
        whole, by_block = stages, job.stages(replace(habits, stagewise=False))
        stages = [keep.within_backward(cost) for cost in by_block]
    if habits.recompute == "budget":
        plain = _orders(degrees, total - left, habits)
        stages = keep.partly_again(plain.rank_of, plain.in_flight, whole, stages, memory)
    elif habits.recompute == "solved":
        plain = _orders(degrees, total - left, habits)
        kept = keep.shared_out(plain.rank_of, plain.in_flight, stages, memory)
        stages = [keep.with_kept(cost, size) for cost, size in zip(stages, kept, strict=True)]
        again = tuple(k for k, size in enumerate(kept) if size != keep.EVERYTHING)
    orders = _orders(degrees, total - left, habits, again)
    seconds = _end_s(orders, stages, links)
    if left:
        fewer = _orders(degrees, total - left - period, habits, again)
        seconds += left / period * (seconds - _end_s(fewer, stages, links))
    mean = total / degrees.pp
    again_s = mean * sum(stages[k].recompute_s for k in again)
    busy_s = mean * sum(c.forward_s + c.backward_s for c in stages) + again_s
    return _Run(seconds, busy_s, again_s, orders.peak_bytes(stages))


def _end_s(orders: KnownOrders, stages: Sequence[StageCost], links: Sequence[float]) -> float:
    """The end of the last work."""
    pipeline = make_pipeline(orders.rank_of, stages, orders.micro_batches, links)
    ends = run_orders(pipeline, orders.works)
    assert ends is not None, "a known schedule ran into a deadlock"
    return max(end[-1] for end in ends)


def _orders(
    degrees: Degrees, micro_batches: int, habits: Habits, again: tuple[int, ...] = ()
) -> KnownOrders:
    """The order of work of each rank, where these stages recompute."""
    return known_orders(
        _name(degrees), degrees.pp, micro_batches, degrees.chunks, again,
        whole_batch=habits.whole_batch,
    )  # fmt: skip


def _name(degrees: Degrees) -> str:
    is_plain = degrees.schedule == "1f1b" and degrees.chunks > 1
    return "interleaved-1f1b" if is_plain else degrees.schedule


def rank_of(degrees: Degrees) -> tuple[int, ...]:
    """The pipeline rank of each stage."""
    chunks = degrees.chunks if degrees.chunks > 1 else None
    return stage_ranks(_name(degrees), degrees.pp, chunks)


def state_seconds(job: Job, habits: Habits) -> tuple[float, float]:
    """Seconds that gradients and parameters are waited for, and those of the optimizer.

    The rank with the most parameters is waited for, and the one with the slowest optimizer.
    """
    pieces, degrees, rank_pieces = job.pieces, job.degrees, job.rank_pieces
    fabric, precision, shards = job.links.fabric, habits.precision, habits.shards
    parameters = job.rank_parameters
    state_s = 0.0
    if degrees.dp > 1:
        most = parameters.index(max(parameters))
        costs = job.costs[most]
        layers = [
            Layer(pieces[k].parameter_count, costs[k].forward_s, costs[k].backward_s)
            for k in rank_pieces[most]
        ]
        if habits.stagewise:
            layers = in_buckets(layers, precision.parameter_bytes)
        group = DpGroup(degrees.dp, fabric, degrees.mesh.dp_stride, habits.overlap)
        # Only the first and the last micro-batch meet communication, unless each one does: then
        # those in between wait equally long.
        total = degrees.micro_batches if shards.gradients > 1 else 1
        met = min(total, STEADY)
        state_s = state_cost(layers, met, shards, group, precision).exposed_s
        if total > met:
            fewer_s = state_cost(layers, met - 1, shards, group, precision).exposed_s
            state_s += (total - met) * (state_s - fewer_s)
    shared = sum(shared_parameters(pieces, job.parts).values())
    if shared:
        ends = Group(2, 2 if degrees.ranks <= fabric.ranks_per_node else 1, fabric.ranks_per_node)
        state_s += all_reduce_seconds(precision.gradient_bytes * shared, ends, fabric)
    optimizer_s = max(
        optimizer_seconds(-(-count // shards.optimizer), precision, place)
        for count, place in zip(parameters, job.places, strict=True)
    )
    return state_s, optimizer_s
