"""The strategies of a job, priced from pieces: thousands of them, the best first.

Analytic bounds say which are looked at, and when to stop; these are run by
`merakc.planner.estimate`, with the orders of work that the runtime has: first 1F1B, then the other
orders of those that a better order could make the best.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from merakc.batches.split import divisors
from merakc.costs.state import Precision
from merakc.errors import CutError, MerakError
from merakc.files.printable import count_of
from merakc.ir.state import stages_given
from merakc.ir.strategy import Form, Strategy
from merakc.machines.cluster import Hardware
from merakc.planner.forms import open_forms
from merakc.planner.job import Job
from merakc.planner.piece_table import PieceTable
from merakc.planner.pricing import (
    Bounds,
    Candidate,
    Outlook,
    Shortage,
    job_of,
    least_in_full_s,
    outlook_of,
    price,
)
from merakc.planner.request import Request
from merakc.schedules.registry import KNOWN

# Samples of a micro-batch that are tried where each number must be recorded, and stages of a rank,
# both where they are open.
MOST_RECORDED = 16
CHUNKS = (2, 4)
SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v")
# Strategies of which the bound is more than that above the best are not looked at.
CLOSE = 1.05
# Those that are looked at behind the one that no other can beat: the runners-up.
RUNNERS_UP = 10


@dataclass
class Candidates:
    """The candidates of a request, the fastest per sample first, and what was refused, by degrees,
    and why.
    """

    table: PieceTable
    ranked: list[Candidate] = field(default_factory=list)
    refused: dict[tuple[int, Form, int], str] = field(default_factory=dict)
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

    def add(self, strategy: Strategy, priced: Candidate | Shortage) -> None:
        """What was looked at, and what it costs."""
        self.looked_at += 1
        degrees = strategy.dp, strategy.form, strategy.pp
        if isinstance(priced, Shortage):
            self.refused.setdefault(degrees, str(priced))
            self._short.append((priced.need_bytes, strategy))
        else:
            self.refused.pop(degrees, None)
            self.ranked.append(priced)
            self.ranked.sort(key=lambda c: c.sample_s)


@dataclass
class _Left:
    """Groups of strategies that are left to be looked at, each by the least seconds a sample that
    it may take; and what is known of its first strategy: nothing, its stages, or its outlook.
    """

    heap: list[tuple[float, int, list[Strategy], Job | Outlook | None]] = field(
        default_factory=list
    )
    count: int = 0

    def add(
        self, least_s: float, group: list[Strategy], known: Job | Outlook | None = None
    ) -> None:
        """One more. Of those that are alike the earlier comes first."""
        heapq.heappush(self.heap, (least_s, self.count, group, known))
        self.count += 1

    def below(
        self, most_s: Callable[[], float]
    ) -> Iterator[tuple[list[Strategy], Job | Outlook | None]]:
        """What is left, the least first, while it may be below."""
        while self.heap and self.heap[0][0] <= most_s():
            _, _, group, known = heapq.heappop(self.heap)
            yield group, known


def find_candidates(
    result: Candidates,
    request: Request,
    hardware: Hardware,
    precision: Precision,
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Adds the fastest strategies of a request to the `result`, by the pieces of its table.

    Each that could be the fastest is priced, and at least `RUNNERS_UP` more. Raises the first error
    where no form can be sharded, and `CutError` where there are too few places to cut.
    """
    table = result.table
    groups: dict[object, list[Strategy]] = {}
    for strategy in open_strategies(result, request, hardware, progress):
        key = strategy.form, strategy.samples, strategy.pp, strategy.inner
        groups.setdefault(key, []).append(strategy)
    if not groups:
        raise _nothing_divides(table, request)
    progress(f"comparing {count_of(sum(map(len, groups.values())), 'layout')}")

    def least_s(strategy: Strategy, like: Outlook | Candidate) -> float:
        """A sample in another order of work, which saves what is idle."""
        own_s = bounds.of(strategy)
        if hardware.is_mixed:  # its stages may suit unlike devices better
            return own_s
        busy_s = like.estimate.step_s - like.estimate.idle_s
        return max(own_s, busy_s / strategy.total_batch_size)

    bounds, left = Bounds(table, hardware), _Left()
    for group in groups.values():
        left.add(min(map(bounds.of, group)) / CLOSE, group)
    for group, known in left.below(lambda: result.best_s):
        (strategy, *others), priced = group, None
        if known is None:  # its stages tell whether it is worth an outlook
            job = job_of(table, strategy, hardware, precision)
            left.add(min([least_in_full_s(job), *map(bounds.of, others)]), group, job)
            continue
        if isinstance(known, Job):
            outlook = outlook_of(known, request, hardware)
            least = [outlook.in_full_s, *(least_s(other, outlook) for other in others)]
            left.add(min(least), group, outlook)
            continue
        if known.in_full_s <= result.best_s:
            priced = price(known, request, hardware)
            result.add(strategy, priced)
        if not isinstance(priced, Shortage):
            for other in others:
                left.add(least_s(other, priced or known), [other])
    for one in result.ranked[:RUNNERS_UP]:  # with the other axis inside
        if min(one.strategy.dp, one.strategy.pp) > 1 and not hardware.is_mixed:
            turned = replace(one.strategy, inner="dp")
            outlook = outlook_of(job_of(table, turned, hardware, precision), request, hardware)
            result.add(turned, price(outlook, request, hardware))


def _nothing_divides(table: PieceTable, request: Request) -> MerakError:
    """Why there is none."""
    size = request.total_batch_size or request.batch_size
    most = max((len(table.pieces(f, 1)) for f in table.forms), default=0)
    none = CutError(
        f"no degrees that divide {count_of(request.world_size, 'rank')} and "
        f"{count_of(size, 'sample')} give a stage to every pipeline rank, of which there can be at "
        f"most {most}; give other degrees, or a batch"
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
    for form in open_forms(request, node, table.experts):
        progress(f"splitting over {form}" + " and sequences" * form.sequence_parallel)
        try:
            pieces = table.pieces(form, 1)
        except MerakError as error:
            result.refused[0, form, 0] = str(error)
            continue
        for strategy in _of_form(request, form, len(pieces)):
            samples = strategy.samples
            many = request.micro_batches is None and samples > MOST_RECORDED
            if many and not table.can_scale(form, samples):
                continue
            # A recording of so many samples may have fewer nodes than that of one.
            if strategy.stage_count > len(table.pieces(form, samples)):
                continue
            yield strategy
            if hardware.is_mixed and min(strategy.dp, strategy.pp) > 1:
                # What devices a stage has depends on which axis lies inside.
                yield replace(strategy, inner="dp")


def _of_form(request: Request, form: Form, pieces: int) -> Iterator[Strategy]:
    """The strategies of one form."""
    lanes, stages = form.lanes, stages_given(request.state_shards)
    for pp in divisors(request.world_size // lanes):
        dp = request.world_size // lanes // pp
        local = request.local_batch_size(dp)
        if request.pp not in (None, pp) or request.dp not in (None, dp) or local is None:
            continue
        for samples in divisors(local):
            if request.micro_batches not in (None, local // samples):
                continue
            for schedule, chunks in _schedules(request, pp):
                if pp * chunks <= pieces and stages in (None, pp * chunks):
                    yield Strategy(
                        dp, pp=pp, batch_size=local, micro_batches=local // samples,
                        schedule=schedule, chunks=chunks, precision=request.precision,
                        **form._asdict(),
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
