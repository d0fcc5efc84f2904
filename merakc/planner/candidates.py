"""The strategies of a job, priced from pieces: thousands of them, the best first.

Analytic bounds say which are looked at, and when to stop; these are run by
`merakc.planner.estimate`, with the orders of work that the runtime has: first 1F1B, then the other
orders of those that a better order could make the best.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

from merakc.analysis.buckets import WORTH_SHARE, bucket_scales
from merakc.costs.device import collective_seconds
from merakc.costs.ranks import least_spare
from merakc.costs.state import Precision
from merakc.costs.work.kernels import KernelKind
from merakc.errors import CutError, MerakError
from merakc.ir.plan_checks import RECOMPUTE
from merakc.ir.state import AUTO, StateShards, coarse_lattice, parse_shards, stages_given
from merakc.ir.strategy import Form, Strategy
from merakc.machines.cluster import Hardware
from merakc.planner.bounds import Bounds, flops_of
from merakc.planner.estimate import (
    Estimate,
    Framework,
    Job,
    estimate_job,
    least_seconds,
    make_job,
    state_seconds,
)
from merakc.planner.forms import open_forms
from merakc.planner.host_estimate import priced
from merakc.planner.piece_table import PieceTable
from merakc.planner.request import Request
from merakc.report.units import format_bytes
from merakc.schedules.registry import KNOWN

# Samples of a micro-batch that are tried where each number must be recorded, and stages of a rank,
# both where they are open.
MOST_RECORDED = 16
CHUNKS = (2, 4)
IDLE = "idle pipeline ranks"
SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v")
# Strategies of which the bound is more than that above the best are not looked at: planned in full
# they may be so much faster than by pieces.
CLOSE = 1.05
FAR = 1.15  # Estimates by pieces are off by up to 14 % where stages are few.
# Ways to shard the state that are tried where something must be recomputed, the fastest first.
TRIED_WAYS = 3
# Kinds of recomputation that are tried where what is asked for is none of a plan's.
OPEN_RECOMPUTE = ("none", "budget", "solved")
# Those that are looked at behind the one that no other can beat: the runners-up.
RUNNERS_UP = 10


@dataclass(frozen=True, slots=True)
class Candidate:
    """A strategy, with its state sharded and recomputed as suits it best, and what it costs."""

    strategy: Strategy
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
        return self.estimate.step_s / self.strategy.total_batch_size


@dataclass(frozen=True, slots=True)
class Shortage:
    """That a strategy does not fit: what its rank of least spare memory needs at the least, or what
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

    table: PieceTable
    ranked: list[Candidate] = field(default_factory=list)
    refused: dict[tuple[int, int, int], str] = field(default_factory=dict)
    looked_at: int = 0
    _short: list[tuple[int, Strategy]] = field(default_factory=list)

    @property
    def best_s(self) -> float:
        """Seconds a sample of the fastest step, once as many were found as are to be shown."""
        return self.ranked[0].sample_s if len(self.ranked) > RUNNERS_UP else math.inf

    @property
    def nearest(self) -> list[Strategy]:
        """Those that were looked at and do not fit, what needs least memory first."""
        return [strategy for _, strategy in sorted(self._short, key=lambda one: one[0])]

    def add(self, strategy: Strategy, priced: Candidate | Shortage | None) -> None:
        """What was looked at, and what it costs; None where it is slower than others."""
        self.looked_at += 1
        degrees = strategy.dp, strategy.tp, strategy.pp
        if isinstance(priced, Shortage):
            self.refused.setdefault(degrees, str(priced))
            self._short.append((priced.need_bytes, strategy))
        elif priced is not None:
            self.refused.pop(degrees, None)
            self.ranked.append(priced)
            self.ranked.sort(key=lambda c: c.sample_s)


def find_candidates(
    result: Candidates,
    request: Request,
    hardware: Hardware,
    precision: Precision,
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Adds the fastest strategies of a request to the `result`, by the pieces of its table.

    Each that could be the fastest is run, and at least `RUNNERS_UP` more. Raises the first error
    where no form can be sharded, and `CutError` where there are too few places to cut.
    """
    table = result.table
    groups: dict[object, list[Strategy]] = {}
    for strategy in open_strategies(result, request, hardware, progress):
        key = strategy.form, strategy.samples, strategy.pp, strategy.inner
        groups.setdefault(key, []).append(strategy)
    if not groups:
        raise _nothing_divides(table, request)
    progress(f"comparing {sum(map(len, groups.values()))} layouts")

    def add(strategy: Strategy) -> Candidate | Shortage | None:
        most_s = FAR * result.best_s
        priced = price_strategy(table, strategy, request, hardware, precision, most_s)
        result.add(strategy, priced)
        return priced

    bounds, alike = Bounds(table, hardware), [*groups.values()]
    left: list[tuple[float, list[Strategy]]] = []
    for least_s, k in sorted((bounds.of(group[0]), k) for k, group in enumerate(alike)):
        if least_s > CLOSE * result.best_s:
            break
        (strategy, *others), first_s = alike[k], least_s
        first = add(strategy)
        if isinstance(first, Candidate) and not hardware.is_mixed:
            # Another order saves what is idle, unless its stages suit unlike devices better.
            idle_s = first.seconds[IDLE]
            first_s = (first.estimate.step_s - idle_s) / strategy.total_batch_size
        if not isinstance(first, Shortage):
            left.append((first_s, others))
    for least_s, others in sorted(left, key=lambda one: one[0]):
        if least_s > result.best_s:
            break
        for strategy in others:
            add(strategy)
    for one in result.ranked[:RUNNERS_UP]:  # with the other axis inside
        if min(one.strategy.dp, one.strategy.pp) > 1 and not hardware.is_mixed:
            add(replace(one.strategy, inner="dp"))


def _nothing_divides(table: PieceTable, request: Request) -> MerakError:
    """Why there is none."""
    size = request.total_batch_size or request.batch_size
    most = max((len(table.pieces(f, 1)) for f in table.forms), default=0)
    none = CutError(
        f"no degrees that divide {request.world_size} ranks and {size} samples give a stage to "
        f"every pipeline rank, of which there can be at most {most}; give other degrees, or a batch"
    )
    return next(iter(table.refused.values()), none)


def open_strategies(
    result: Candidates,
    request: Request,
    hardware: Hardware,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[Strategy]:
    """All strategies of a request that divide; the `result` is told of what cannot be split."""
    table, node = result.table, hardware.nodes[0].devices
    for form in open_forms(request, node):
        progress(f"splitting over {form}" + " and sequences" * form.sequence_parallel)
        try:
            pieces = table.pieces(form, 1)
        except MerakError as error:
            result.refused[0, form.tp, 0] = str(error)
            continue
        most = math.inf if table.can_scale(form) else MOST_RECORDED
        for strategy in _of_form(request, form, len(pieces)):
            if request.micro_batches is None and strategy.samples > most:
                continue
            yield strategy
            if hardware.is_mixed and min(strategy.dp, strategy.pp) > 1:
                # What devices a stage has depends on which axis lies inside.
                yield replace(strategy, inner="dp")


def _of_form(request: Request, form: Form, pieces: int) -> Iterator[Strategy]:
    """The strategies with one degree of tp."""
    tp, stages = form.tp, stages_given(request.state_shards)
    for pp in _divisors(request.world_size // tp):
        dp = request.world_size // tp // pp
        local = request.local_batch_size(dp)
        if request.pp not in (None, pp) or request.dp not in (None, dp) or local is None:
            continue
        for samples in _divisors(local):
            if request.micro_batches not in (None, local // samples):
                continue
            for schedule, chunks in _schedules(request, pp):
                if pp * chunks <= pieces and stages in (None, pp * chunks):
                    yield Strategy(
                        dp, tp, pp, batch_size=local, micro_batches=local // samples,
                        schedule=schedule, chunks=chunks, sequence_parallel=form.sequence_parallel,
                        context_parallel=form.context_parallel,
                        expert_parallel=form.expert_parallel, precision=request.precision,
                    )  # fmt: skip


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


def job_of(table: PieceTable, strategy: Strategy, hardware: Hardware, precision: Precision) -> Job:
    """The pieces of a model on the stages of a strategy, as merakc's runtime runs them."""
    overlap = hardware.beside(strategy.world_size)
    framework = Framework(precision, overlap, stagewise=True, whole_batch=table.couples)
    pieces = table.pieces(strategy.form, strategy.samples)
    return make_job(pieces, strategy, hardware, framework)


def price_strategy(
    table: PieceTable,
    strategy: Strategy,
    request: Request,
    hardware: Hardware,
    precision: Precision,
    most_s: float = math.inf,
) -> Candidate | Shortage | None:
    """The strategy with the shards and the recomputation that suit it best, or why it cannot be;
    None where it cannot take as few as `most_s` seconds a sample.
    """
    job = job_of(table, strategy, hardware, precision)
    least_s, step_s = least_seconds(job), most_s * strategy.total_batch_size
    if least_s > step_s:
        return None
    shards = state_choices(request, job, hardware)
    waits = dict(in_good_buckets(job, one, least_s) for one in shards)
    if least_s + min(map(sum, waits.values())) > step_s:
        return None
    kinds = (request.recompute,) if request.recompute in RECOMPUTE else OPEN_RECOMPUTE
    fit = partial(_fitting, waits=waits, kinds=kinds)
    fitting, offload = priced(request.offload, job, hardware, fit)
    if isinstance(fitting, Shortage):
        return fitting
    best, recompute, estimate = min(fitting, key=lambda one: one[2].step_s)
    of_stages = (best,) * len(job.parts)
    decided = replace(strategy, recompute=recompute, state_shards=of_stages, offload=offload)
    return Candidate(decided, estimate, _seconds(job, estimate), flops_of(job.pieces))


def in_good_buckets(
    job: Job, shards: StateShards, least_s: float
) -> tuple[StateShards, tuple[float, float]]:
    """The shards in buckets as large as pays, and their `state_seconds`; of a step that takes
    `least_s` seconds at the least.
    """
    found, waits = shards, state_seconds(job, shards)
    held_bytes = job.framework.precision.kept_bytes * max(job.rank_parameters)
    for scale in bucket_scales(held_bytes)[1:] if shards.optimizer > 1 else ():
        if waits[0] <= WORTH_SHARE * least_s:
            break
        larger = replace(shards, bucket_scale=scale)
        found, waits = min((found, waits), (larger, state_seconds(job, larger)), key=lambda w: w[1])
    return found, waits


def _fitting(
    job: Job, waits: Mapping[StateShards, tuple[float, float]], kinds: Sequence[str]
) -> list[tuple[StateShards, str, Estimate]] | Shortage:
    """What fits of these kinds of recomputation, the least first, with the shards that are waited
    for least; nothing more is recomputed where the fastest shards fit.
    """
    ways = sorted(waits, key=lambda one: sum(waits[one]))
    held, memory = [job.state_bytes(way) for way in ways], job.memory_bytes
    of_state = least = min(_need(sizes, memory) for sizes in held)
    fitting: list[tuple[StateShards, str, Estimate]] = []

    @cache
    def estimated(way: StateShards, recompute: str) -> Estimate:
        return estimate_job(job, way, recompute, waits[way])

    for recompute in kinds:
        open_ways = [k for k, sizes in enumerate(held) if all(map(operator.lt, sizes, memory))]
        if recompute == "none" and open_ways:
            kept = estimated(ways[0], recompute)
            others = [peak - sizes for peak, sizes in zip(kept.peak_bytes, held[0], strict=True)]
            peaks = [[a + b for a, b in zip(others, sizes, strict=True)] for sizes in held]
            open_ways = [k for k in open_ways if all(map(operator.le, peaks[k], memory))][:1]
            least = max(least, min(_need(sizes, memory) for sizes in peaks))
        for way in (ways[k] for k in open_ways[:TRIED_WAYS]):
            estimate = estimated(way, recompute)
            if recompute != "none":
                least = min(least, _need(estimate.peak_bytes, memory))
            if all(map(operator.le, estimate.peak_bytes, memory)):
                fitting.append((way, recompute, estimate))
        if any(way == ways[0] for way, *_ in fitting):
            break
    return fitting or Shortage(least, of_state=least == of_state)


def _need(peak_bytes: Sequence[int], memory_bytes: Sequence[int]) -> int:
    """What the rank needs that has least to spare."""
    return peak_bytes[least_spare(peak_bytes, memory_bytes)]


def state_choices(request: Request, job: Job, hardware: Hardware) -> list[StateShards]:
    """Those asked for; else those over no ranks, the ranks of a node and all of dp and cp."""
    mesh, asked = job.strategy.mesh, request.state_shards
    if asked is not None and asked != AUTO:
        return [parse_shards(asked, mesh.state_ranks, len(job.parts))[0]]
    inside = hardware.nodes[0].devices // mesh.state_stride
    return list(coarse_lattice(mesh.state_ranks, inside))


def _seconds(job: Job, estimate: Estimate) -> dict[str, float]:
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
    tp_s = sum(wires[id(p)] for p in job.pieces) * job.strategy.micro_batches / job.strategy.pp
    idle_s = estimate.pipeline_s * estimate.bubble_share
    rest_s = estimate.pipeline_s - idle_s - tp_s - estimate.recompute_s
    return {
        "arithmetic": rest_s, IDLE: idle_s, "tp communication": tp_s,
        "recomputation": estimate.recompute_s, "waiting for dp": estimate.state_s,
        "optimizer": estimate.optimizer_s,
    }  # fmt: skip
