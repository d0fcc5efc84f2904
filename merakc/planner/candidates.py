"""The layouts of a job, priced from pieces: thousands of them, the best first.

Analytic bounds say which layouts are looked at, and when to stop; these are run by
`merakc.planner.estimate`, with the orders of work that the runtime has: first 1F1B, then the other
orders of those layouts that a better order could make the best.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from merakc.costs.device import collective_seconds, total_flops
from merakc.costs.ranks import least_spare
from merakc.costs.state import Precision
from merakc.costs.work.kernels import KernelKind
from merakc.errors import CutError, MerakError
from merakc.ir.state import AUTO, StateShards, coarse_lattice, parse_shards, stages_given
from merakc.machines.cluster import Hardware
from merakc.planner.bounds import Bounds, Layout
from merakc.planner.estimate import (
    Degrees,
    Estimate,
    Habits,
    Job,
    Recompute,
    estimate_job,
    least_seconds,
    make_job,
    state_seconds,
)
from merakc.planner.piece_table import PieceTable
from merakc.planner.search import Request
from merakc.report.units import format_bytes
from merakc.schedules.registry import KNOWN

# Samples of a micro-batch that are tried where each number must be recorded, and stages of a rank,
# both where they are open.
MOST_RECORDED = 16
CHUNKS = (2, 4)
IDLE = "idle pipeline ranks"
SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v")
# Layouts of which the bound is more than that above the best are not looked at: planned in full
# they may be so much faster than by pieces.
CLOSE = 1.05
FAR = 1.15  # Estimates by pieces are off by up to 14 % where stages are few.
# Ways to shard the state that are tried where something must be recomputed, the fastest first.
TRIED_WAYS = 3
RECOMPUTES: dict[str, tuple[Recompute, ...]] = {
    "none": ("none",), "full": ("blocks",), "stage": ("full",), "selective": ("blocks",),
}  # fmt: skip
# Layouts that are looked at behind the one that no other can beat: the runners-up.
RUNNERS_UP = 10


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout with all that follows from it: how its state is sharded, what is recomputed."""

    layout: Layout
    habits: Habits
    estimate: Estimate
    seconds: dict[str, float]  # of the step, by what they go into
    flops: int  # of a micro-batch on one tp rank, forward and backward

    @property
    def peak_bytes(self) -> int:
        """Of the fullest rank."""
        return max(self.estimate.peak_bytes)

    @property
    def sample_s(self) -> float:
        """Seconds of a step for each sample of the whole batch."""
        return self.estimate.step_s / self.layout.batch_size


@dataclass(frozen=True, slots=True)
class Shortage:
    """That a layout does not fit: what its rank of least spare memory needs at the least, or what
    its state alone takes.
    """

    need_bytes: int
    of_state: bool = False

    def __str__(self) -> str:
        size = format_bytes(self.need_bytes)
        return f"the state of a rank is {size}" if self.of_state else f"a rank needs {size}"


@dataclass
class Candidates:
    """The candidates of a request, the fastest per sample first, and what was refused, by degrees,
    and why.
    """

    found: list[Candidate] = field(default_factory=list)
    refused: dict[tuple[int, int, int], str] = field(default_factory=dict)
    looked_at: int = 0
    table: PieceTable | None = None
    _short: list[tuple[int, Layout]] = field(default_factory=list)

    @property
    def best_s(self) -> float:
        """Seconds a sample of the fastest step, once as many were found as are to be shown."""
        return self.found[0].sample_s if len(self.found) > RUNNERS_UP else math.inf

    @property
    def nearest(self) -> list[Layout]:
        """The layouts that were looked at and do not fit, what needs least memory first."""
        return [layout for _, layout in sorted(self._short, key=lambda one: one[0])]

    def add(self, layout: Layout, found: Candidate | Shortage | None) -> None:
        """A layout that was looked at, and what was found; None where it is slower than others."""
        self.looked_at += 1
        d = layout.degrees
        if isinstance(found, Shortage):
            self.refused.setdefault((d.dp, d.tp, d.pp), str(found))
            self._short.append((found.need_bytes, layout))
        elif found is not None:
            self.refused.pop((d.dp, d.tp, d.pp), None)
            self.found.append(found)
            self.found.sort(key=lambda c: c.sample_s)


def find_candidates(
    table: PieceTable,
    request: Request,
    hardware: Hardware,
    precision: Precision,
    progress: Callable[[str], None] = lambda _: None,
) -> Candidates:
    """The fastest layouts of a request, by their pieces.

    Every layout that could be the fastest is run, and at least `RUNNERS_UP` more. Raises the first
    error where no form can be sharded, and `CutError` where there are too few places to cut.
    """
    result = Candidates(table=table)
    groups: dict[object, list[Layout]] = {}
    for layout in open_layouts(table, request, hardware, result, progress):
        key = layout.form, layout.samples, layout.degrees.pp, layout.degrees.inner
        groups.setdefault(key, []).append(layout)
    if not groups:
        raise _no_layout(table, request)
    progress(f"comparing {sum(map(len, groups.values()))} layouts")
    bounds = Bounds(table, hardware)

    def price(layout: Layout) -> Candidate | Shortage | None:
        return price_layout(table, layout, request, hardware, precision, FAR * result.best_s)

    firsts: list[tuple[float, list[Layout]]] = []
    for own in sorted(groups.values(), key=lambda own: bounds.of(own[0])):
        least_s = bounds.of(own[0])
        if least_s > CLOSE * result.best_s:
            break
        first = price(own[0])
        result.add(own[0], first)
        if isinstance(first, Candidate) and not hardware.is_mixed:
            # Another order saves what is idle, unless its stages suit unlike devices better.
            least_s = (first.estimate.step_s - first.seconds[IDLE]) / own[0].batch_size
        if not isinstance(first, Shortage):
            firsts.append((least_s, own[1:]))
    for least_s, others in sorted(firsts, key=lambda one: one[0]):
        if least_s > result.best_s:
            break
        for layout in others:
            result.add(layout, price(layout))
    for one in result.found[:RUNNERS_UP]:  # with the other axis inside
        d = one.layout.degrees
        if min(d.dp, d.pp) > 1 and not hardware.is_mixed:
            layout = replace(one.layout, degrees=replace(d, inner="dp"))
            result.add(layout, price(layout))
    return result


def _no_layout(table: PieceTable, request: Request) -> MerakError:
    """Why there is none."""
    size = request.total_batch_size or request.batch_size
    most = max((len(table.pieces(f, 1)) for f in table.forms), default=0)
    none = CutError(
        f"no degrees that divide {request.world_size} ranks and {size} samples give a stage to "
        f"every pipeline rank, of which there can be at most {most}; give other degrees, or a batch"
    )
    return next(iter(table.refused.values()), none)


def open_layouts(
    table: PieceTable,
    request: Request,
    hardware: Hardware,
    result: Candidates,
    progress: Callable[[str], None],
) -> Iterator[Layout]:
    """All layouts that divide."""
    ranks, node = request.world_size, hardware.nodes[0].devices
    for tp in _divisors(ranks):
        fixed = tp * (request.pp or 1) * (request.dp or 1)
        if ranks % fixed or (request.pp and request.dp and fixed != ranks):
            continue
        if request.tp not in (None, tp) or (request.tp is None and tp > node):
            continue
        for sequence_parallel in (False, True) if tp > 1 else (False,):
            if request.sequence_parallel not in (None, sequence_parallel) and tp > 1:
                continue
            progress(f"splitting over tp={tp}" + " and sequences" * sequence_parallel)
            try:
                pieces = table.pieces((tp, sequence_parallel), 1)
            except MerakError as error:
                result.refused[0, tp, 0] = str(error)
                continue
            most = math.inf if table.can_scale((tp, sequence_parallel)) else MOST_RECORDED
            for degrees, samples in _degrees(request, tp, len(pieces)):
                if request.micro_batches is None and samples > most:
                    continue
                yield Layout(degrees, samples, sequence_parallel)
                if hardware.is_mixed and min(degrees.dp, degrees.pp) > 1:
                    # What devices a stage has depends on which axis lies inside.
                    yield Layout(replace(degrees, inner="dp"), samples, sequence_parallel)


def _degrees(request: Request, tp: int, pieces: int) -> Iterator[tuple[Degrees, int]]:
    """The degrees for one of tp, with the samples of a micro-batch."""
    stages = stages_given(request.state_shards)
    for pp in _divisors(request.world_size // tp):
        dp = request.world_size // tp // pp
        local = request.local_batch_size(dp)
        if request.pp not in (None, pp) or request.dp not in (None, dp) or local is None:
            continue
        for samples in _divisors(local):
            micro_batches = local // samples
            if request.micro_batches not in (None, micro_batches):
                continue
            for schedule, chunks in _schedules(request, pp):
                if pp * chunks <= pieces and stages in (None, pp * chunks):
                    degrees = Degrees(dp, tp, pp, micro_batches, chunks, schedule=schedule)
                    yield degrees, samples


def _schedules(request: Request, pp: int) -> Iterator[tuple[str, int]]:
    if pp == 1:
        yield "1f1b", 1
        return
    for name in SCHEDULES if request.schedule == "auto" else (request.schedule,):
        if name not in KNOWN:  # an order of the user's own: of one stage a rank, to be priced
            yield "1f1b", 1
            continue
        possible = KNOWN[name].virtual_stages
        asked = (request.chunks,) if request.chunks else CHUNKS
        for chunks in asked if len(possible) > 1 else possible[:1]:
            yield name, chunks


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def price_layout(
    table: PieceTable,
    layout: Layout,
    request: Request,
    hardware: Hardware,
    precision: Precision,
    most_s: float = math.inf,
) -> Candidate | Shortage | None:
    """The layout with the shards and the recomputation that suit it best, or why it cannot be; None
    where it cannot take as few as `most_s` seconds a sample.
    """
    pieces = table.pieces(layout.form, layout.samples)
    base = Habits(stagewise=True, precision=precision, overlap=1.0, whole_batch=table.couples)
    job = make_job(pieces, layout.degrees, hardware, base)
    shards = state_choices(request, job, hardware)
    waits = {one: state_seconds(job, replace(base, shards=one)) for one in shards}
    ways = sorted((replace(base, shards=one) for one in waits), key=lambda w: sum(waits[w.shards]))
    if least_seconds(job, base) + sum(waits[ways[0].shards]) > most_s * layout.batch_size:
        return None

    @cache
    def estimated(habits: Habits) -> Estimate:
        return estimate_job(job, habits, waits[habits.shards])

    held = [job.state_bytes(way.shards, precision) for way in ways]
    memory = [place.device.memory_bytes for place in job.places]
    least = min(_need(own, memory) for own in held)
    tried: list[tuple[Habits, Estimate]] = []
    for recompute in RECOMPUTES.get(request.recompute, ("none", "budget", "solved")):
        open_ways = [k for k, own in enumerate(held) if all(map(operator.lt, own, memory))]
        if recompute == "none" and open_ways:
            kept = estimated(replace(ways[0], recompute=recompute))
            others = [peak - own for peak, own in zip(kept.peak_bytes, held[0], strict=True)]
            peaks = [[a + b for a, b in zip(others, own, strict=True)] for own in held]
            open_ways = [k for k in open_ways if all(map(operator.le, peaks[k], memory))][:1]
            least = max(least, min(_need(own, memory) for own in peaks))
        for k in open_ways[:TRIED_WAYS]:
            habits = replace(ways[k], recompute=recompute)
            found = estimated(habits)
            least = min(least, _need(found.peak_bytes, memory)) if recompute != "none" else least
            if all(map(operator.le, found.peak_bytes, memory)):
                tried.append((habits, found))
        if any(habits.shards == ways[0].shards for habits, _ in tried):
            break  # the fastest shards, and nothing recomputed
    if not tried:
        return Shortage(least, least == min(_need(own, memory) for own in held))
    habits, found = min(tried, key=lambda one: one[1].step_s)
    flops = {
        id(p): total_flops(p.work.forward) + total_flops(p.work.backward)
        for p in {id(p): p for p in pieces}.values()
    }
    total = sum(flops[id(p)] for p in pieces)
    return Candidate(layout, habits, found, _seconds(job, found), total)


def _need(peak_bytes: Sequence[int], memory_bytes: Sequence[int]) -> int:
    """What the rank needs that has least to spare."""
    return peak_bytes[least_spare(peak_bytes, memory_bytes)]


def state_choices(request: Request, job: Job, hardware: Hardware) -> list[StateShards]:
    """Those asked for; else those over no ranks, the ranks of a node and all of dp."""
    dp, asked = job.degrees.dp, request.state_shards
    if asked is not None and asked != AUTO:
        return [parse_shards(asked, dp, len(job.parts))[0]]
    return list(coarse_lattice(dp, hardware.nodes[0].devices // job.degrees.mesh.dp_stride))


def _seconds(job: Job, found: Estimate) -> dict[str, float]:
    """What the seconds of a step go into, on an average rank."""
    group, fabric = job.links.group, job.links.fabric
    unique = {id(piece): piece for piece in job.pieces}
    wires = {
        key: sum(
            count * collective_seconds(kernel, group, fabric)
            for work in (piece.work.forward, piece.work.backward)
            for kernel, count in work.items()
            if kernel.kind is KernelKind.COLLECTIVE
        )
        for key, piece in unique.items()
    }
    tp_s = sum(wires[id(p)] for p in job.pieces) * job.degrees.micro_batches / job.degrees.pp
    idle_s = found.pipeline_s * found.bubble_share
    rest_s = found.pipeline_s - idle_s - tp_s - found.recompute_s
    return {
        "arithmetic": rest_s, IDLE: idle_s, "tp communication": tp_s,
        "recomputation": found.recompute_s, "waiting for dp": found.state_s,
        "optimizer": found.optimizer_s,
    }  # fmt: skip
