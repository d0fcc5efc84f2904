"""What a job lacks where no layout of it fits the memory: how much it needs at the least, what
would make it fit, and how many devices would do.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from merakc.costs.host import host_bytes
from merakc.costs.ranks import least_spare, rank_memory_bytes
from merakc.costs.state import Precision
from merakc.errors import FitError, MerakError
from merakc.files.printable import count_of
from merakc.ir.offload import NONE, OPTIMIZER, PARAMETERS, offload_text, parse_offload
from merakc.ir.program import Mesh
from merakc.ir.state import AUTO, UNSHARDED, StateShards
from merakc.ir.strategy import Strategy
from merakc.machines.cluster import Cluster, Hardware
from merakc.planner.candidates import Candidates, open_strategies
from merakc.planner.choose import state_precision
from merakc.planner.estimate import estimate_job
from merakc.planner.host_estimate import host_for, without_state
from merakc.planner.job import Job
from merakc.planner.piece_table import PieceTable
from merakc.planner.pricing import job_of, state_choices
from merakc.planner.request import Request
from merakc.planner.search import Record
from merakc.report.units import format_bytes

# Seconds after which no more devices are looked for, and how many times as many as there are.
LOOKING_S, MOST_TIMES = 10.0, 1 << 12
RECOMPUTING = ("full", "auto")
# What a plan predicts is up to 11 % more than its built step takes.
ROUGHLY = 1.25
# Of what a device needs, the share beside the state below which a shorter sequence helps little.
MUCH = 0.1


@dataclass(frozen=True, slots=True)
class Least:
    """The strategy that lacks least memory, with most sharded and recomputed of what is open.

    `need_bytes` are those of its rank that lacks most, `state_bytes` of them its parameters,
    gradients and optimizer state, `have_bytes` what that has. What may live on the host is there,
    but for `stays_bytes` of the state, for which that has no room.
    """

    need_bytes: int
    have_bytes: int
    state_bytes: int
    strategy: Strategy
    stays_bytes: int = 0

    @property
    def fits(self) -> bool:
        """Whether every rank has enough."""
        return self.need_bytes <= self.have_bytes

    @property
    def lacks_bytes(self) -> int:
        """What is missing; below zero where it fits."""
        return self.need_bytes - self.have_bytes

    def __str__(self) -> str:
        chosen, shards = self.strategy, self.strategy.shards(0)
        sharded = f", state in {shards} shards" if shards != UNSHARDED else ""
        again = f", recompute='{chosen.recompute}'" if chosen.recompute != "none" else ""
        again += f", offload='{chosen.offload}'" if chosen.offload != NONE else ""
        return (
            f"{chosen.degrees}, {count_of(chosen.micro_batches, 'micro-batch')} "
            f"of {chosen.samples}{sharded}{again}"
        )


def find_least(
    table: PieceTable, request: Request, hardware: Hardware, precision: Precision
) -> Least | None:
    """What a request needs at the least, by the pieces of the model; None where nothing divides."""
    every = [
        _least_of(table, strategy, request, hardware, precision)
        for strategy in _leanest(table, request, hardware)
    ]
    return min(every, key=lambda one: (one.lacks_bytes, one.need_bytes), default=None)


def _leanest(table: PieceTable, request: Request, hardware: Hardware) -> Iterator[Strategy]:
    """Of each mesh and form, the strategy of the smallest micro-batches, and the plainest; where
    gradients may leave as they are made, that of one micro-batch too.
    """
    moves = host_for(request.offload, hardware) is not None
    first: dict[object, Strategy] = {}
    for strategy in open_strategies(Candidates(table), request, hardware):
        key = strategy.mesh, strategy.form, moves and strategy.micro_batches == 1
        if strategy.samples < first.setdefault(key, strategy).samples:
            first[key] = strategy
    yield from first.values()


def _least_of(
    table: PieceTable, strategy: Strategy, request: Request, hardware: Hardware,
    precision: Precision,
) -> Least:  # fmt: skip
    """Of one strategy."""
    job = job_of(table, strategy, hardware, precision)
    every = state_choices(request, job, hardware)
    tried: list[Least] = []
    for kinds in _may_move(request, hardware):
        fetches = PARAMETERS in kinds
        moved = without_state(job, parameters=fetches) if kinds else job
        ways = [way for way in every if way.updates_what_it_keeps or not fetches]
        stays = {way: _stays_bytes(job, way, hardware, fetches) if kinds else 0 for way in ways}
        held = {way: [own + stays[way] for own in moved.state_bytes(way)] for way in ways}
        shards = min(held, key=lambda way: (max(held[way]), way), default=None)
        asked = request.recompute
        for recompute in (asked,) if asked in ("none", "full", "stage") else ("none", "full"):
            if shards is None:
                continue
            peaks = estimate_job(moved, shards, recompute, (0.0, 0.0)).peak_bytes
            rank = max(range(len(peaks)), key=lambda r: peaks[r] - job.memory_bytes[r])
            decided = replace(
                strategy, recompute=recompute, state_shards=(shards,) * len(job.parts),
                offload=offload_text(set(kinds)),
            )  # fmt: skip
            need_bytes, have_bytes = peaks[rank] + stays[shards], job.memory_bytes[rank]
            tried.append(Least(need_bytes, have_bytes, held[shards][rank], decided, stays[shards]))
    return min(tried, key=lambda one: one.lacks_bytes)


def _may_move(request: Request, hardware: Hardware) -> Iterator[tuple[str, ...]]:
    """What of the state may live on the host at once."""
    offload = parse_offload(request.offload)
    if host_for(request.offload, hardware) is None:
        yield ()
        return
    yield (OPTIMIZER,)
    if offload.may(PARAMETERS):
        yield OPTIMIZER, PARAMETERS


def _stays_bytes(job: Job, way: StateShards, hardware: Hardware, fetches: bool) -> int:
    """What a rank's host has no room for of its state, and of its parameters where it `fetches`."""
    assert hardware.host is not None
    precision, owned = job.framework.precision, max(job.owned(way))
    moved = host_bytes(owned, precision)
    if fetches:  # what it updates
        moved += owned * precision.parameter_bytes
    return max(moved - hardware.host.memory_bytes, 0)


@dataclass(frozen=True)
class Fit:
    """Whether steps of a request fit the memory of its machines. With `shared`, ranks have that
    of their machine together, and not each as much: what they need on average counts.
    """

    request: Request
    record: Record
    cluster: Cluster
    shared: bool

    def check(self, peak_bytes: Sequence[int], mesh: Mesh, *, rough: bool = False) -> None:
        """Raises `FitError` where a pipeline rank's peak is beyond its memory, or far beyond where
        peaks are `rough`, as those of plans are.
        """
        memory = rank_memory_bytes(self.cluster, mesh)
        rank = least_spare(peak_bytes, memory)
        need = sum(peak_bytes) // len(peak_bytes) if self.shared else peak_bytes[rank]
        if need > memory[rank] * (ROUGHLY if rough else 1.0):
            along = f" cp={mesh.cp}" * (mesh.cp > 1)
            layout = f"with dp={mesh.dp}{along} tp={mesh.tp} pp={mesh.pp} a rank needs"
            needs = f"{layout} {format_bytes(need)} and has {format_bytes(memory[rank])}"
            raise fit_error(self.request, self.record, self.cluster, needs=needs)


def fit_error(
    request: Request, record: Record, cluster: Cluster, table: PieceTable | None = None,
    needs: str = "",
) -> FitError:  # fmt: skip
    """The error for a request of which nothing fits, or a plan of it that `needs` too much.

    It says what is needed at the least of what there is, which of the things that were asked for
    stand in the way, and how many devices of the kind would do.
    """
    table = table or PieceTable(record, cluster)
    precision = state_precision(record, request)

    def least(asked: Request) -> Least | None:
        return find_least(table, asked, cluster.described(asked.world_size), precision)

    leanest = least(request)
    if leanest is None:
        return FitError(f"{needs or 'no layout'}, and no other layout divides ranks and batch")
    have = format_bytes(leanest.have_bytes)
    told = needs or f"nothing fits the {have} that a device has for tensors"
    if leanest.fits:
        size = format_bytes(leanest.need_bytes)
        return FitError(f"{told}; another layout should fit, with {size}: {leanest}")
    told += (
        f": any layout of what is asked needs {format_bytes(leanest.need_bytes)} at the least, "
        f"{format_bytes(leanest.state_bytes)} of it for parameters, gradients and the optimizer's "
        f"state ({leanest})"
    )
    if leanest.stays_bytes:
        told += f", {format_bytes(leanest.stays_bytes)} of which the host has no room for"
    return FitError(f"{told}. {_remedy(request, leanest, least)}")


def _remedy(request: Request, leanest: Least, least: Any) -> str:
    """What would make it fit."""
    open_ = _opened(request)
    alone = {}
    for name, asked in open_.items():
        other = least(asked)
        if other is not None and other.fits:
            alone[name] = other
    told = [f"with {_said(name)} it fits: {other}" for name, other in alone.items()]
    free = request
    for name in open_:
        free = replace(free, **_FREE[name])
    if not alone and len(open_) > 1:
        other = least(free)
        if other is not None and other.fits:
            told.append(f"with {', '.join(map(_said, open_))} it fits: {other}")
    if not told:
        told += _more_devices(free, least)
    if leanest.need_bytes - leanest.state_bytes > MUCH * leanest.need_bytes:
        told.append("a shorter sequence, or fewer samples in a micro-batch, takes less")
    return "; ".join(told) or "give larger devices"


def _said(name: str) -> str:
    """What is open, as people say it: what is not left so is given."""
    return "offload='auto'" if name == "offload" else f"{name} left open"


_FREE: Mapping[str, dict[str, Any]] = {
    "recompute": {"recompute": "auto"},
    "state_shards": {"state_shards": AUTO},
    "micro_batches": {"micro_batches": None},
    "schedule": {"schedule": "auto", "order": (), "chunks": None},
    "sequence_parallel": {"sequence_parallel": None},
    "cp": {"cp": None, "expert_parallel": None},
    "offload": {"offload": AUTO},
    "the degrees": {"dp": None, "tp": None, "pp": None},
}


def _opened(request: Request) -> dict[str, Request]:
    """The request with each of the things that it fixes left open, by what these are called."""
    fixed = {
        "recompute": request.recompute not in RECOMPUTING,
        "state_shards": request.state_shards not in (None, AUTO),
        "micro_batches": request.micro_batches is not None,
        "schedule": request.schedule != "auto",
        "sequence_parallel": request.sequence_parallel is not None,
        "cp": request.cp is not None,
        "offload": request.offload != AUTO,
        "the degrees": any((request.dp, request.tp, request.pp)) and request.world_size > 1,
    }
    return {name: replace(request, **_FREE[name]) for name, is_fixed in fixed.items() if is_fixed}


def _more_devices(free: Request, least: Any) -> Iterator[str]:
    """How many devices of the kind would do, by doubling, as far as there is time to look."""
    free = replace(free, dp=None, tp=None, pp=None)
    end_s = time.monotonic() + LOOKING_S
    ranks = free.world_size
    while ranks < MOST_TIMES * free.world_size and time.monotonic() < end_s:
        ranks *= 2
        try:
            other = least(replace(free, world_size=ranks))
        except MerakError:
            other = None
        if other is not None and other.fits:
            how = "with everything left open"
            how += ", offload='auto' among it" if other.strategy.offload != NONE else ""
            yield f"{ranks} such devices would do, {how}: {other}"
            return
    more = "more were not looked at" if ranks < MOST_TIMES * free.world_size else "nor would more"
    yield f"{ranks} such devices would not do ({more}); give larger ones"
