"""The strategies of a job, priced from pieces: thousands of them, the best first.

Analytic bounds say which are looked at, the lowest first, and when to stop; these are run by
`merakc.planner.estimate`, with the orders of work that the runtime has: first 1F1B, then the other
orders of those that a better order could make the best. More are priced when more are asked for.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

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
    FAR,
    Bounds,
    Candidate,
    Outlook,
    Shortage,
    job_of,
    outlook_of,
    price,
    shortest_sample_s,
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
# What candidates may take that are priced: seconds a sample by their pieces, and planned in full at
# the least.
Limits = Callable[[], tuple[float, float]]


@dataclass
class Candidates:
    """The candidates of a request, the fastest per sample first, and what was refused, by degrees,
    and why; `left` are those that are priced only where more are asked for.
    """

    table: PieceTable
    ranked: list[Candidate] = field(default_factory=list)
    refused: dict[tuple[int, Form, int], str] = field(default_factory=dict)
    looked_at: int = 0
    left: Left | None = None
    _short: list[tuple[int, Strategy]] = field(default_factory=list)

    @property
    def best_s(self) -> float:
        """Seconds a sample of the fastest step, once as many were found as are to be shown."""
        return self.ranked[0].sample_s if len(self.ranked) > RUNNERS_UP else math.inf

    @property
    def last_s(self) -> float:
        """The same of the slowest that is to be shown."""
        return self.ranked[RUNNERS_UP].sample_s if len(self.ranked) > RUNNERS_UP else math.inf

    @property
    def nearest(self) -> list[Strategy]:
        """Those that were looked at and do not fit, what needs least memory first."""
        return [strategy for _, strategy in sorted(self._short, key=lambda one: one[0])]

    def in_order(self, limits: Limits) -> Iterator[Candidate]:
        """The fastest first. Others than were found before are priced within the `limits`."""
        given: set[int] = set()
        while True:
            one = next((c for c in self.ranked if id(c) not in given), None)
            most_s, in_full_s = limits()
            most_s = most_s if one is None else min(most_s, one.sample_s)
            if self.left is not None and self.left.goes_on(self, most_s, in_full_s):
                continue
            if one is None:
                return
            given.add(id(one))
            yield one

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


class _Group(NamedTuple):
    """Strategies that are alike but for their order of work, with the least seconds a sample that
    the first of them may take by its pieces, and in full; and what is known of that one: nothing,
    its stages, or its outlook. Of groups that are alike the earlier comes first.
    """

    least_s: float
    place: int
    in_full_s: float
    strategies: list[Strategy]
    known: Job | Outlook | None


@dataclass
class Left:
    """The strategies of a request that are left to be looked at."""

    request: Request
    hardware: Hardware
    precision: Precision
    bounds: Bounds
    _heap: list[_Group] = field(default_factory=list)
    _count: int = 0

    def add(
        self, least_s: float, in_full_s: float, group: list[Strategy],
        known: Job | Outlook | None = None,
    ) -> None:  # fmt: skip
        """One group more."""
        # Of ranks that share cores bounds by pieces say less.
        least_s = least_s if self.hardware.sharing is None else in_full_s
        heapq.heappush(self._heap, _Group(least_s, self._count, in_full_s, group, known))
        self._count += 1

    def goes_on(self, result: Candidates, most_s: float, in_full_s: float = math.inf) -> bool:
        """Looks at the group that may be fastest, if it may take no more than so much by its
        pieces, nor more in full than that and than the best does by its pieces; whether there was
        one.
        """
        while self._heap and self._heap[0].least_s <= most_s:
            group = heapq.heappop(self._heap)
            if group.in_full_s <= min(result.best_s, in_full_s):
                self._look_at(group, result)
                return True
        return False

    def _look_at(self, group: _Group, result: Candidates) -> None:
        (strategy, *others), known = group.strategies, group.known
        if known is None:  # its stages tell whether it is worth an outlook
            job = job_of(result.table, strategy, self.hardware, self.precision)
            least = [self.bounds.of(other) for other in others]
            own_s = shortest_sample_s(job)
            self.add(min([own_s, *least]), min([own_s / FAR, *least]), group.strategies, job)
            return
        if isinstance(known, Job):
            outlook = outlook_of(known, self.request, self.hardware)
            least = [self._least_s(other, outlook) for other in others]
            in_full_s = min([outlook.in_full_s, *least])
            self.add(min([outlook.sample_s, *least]), in_full_s, group.strategies, outlook)
            return
        priced = None
        if known.in_full_s <= result.best_s:
            priced = price(known, self.request, self.hardware)
            result.add(strategy, priced)
        if not isinstance(priced, Shortage):
            for other in others:
                least_s = self._least_s(other, priced or known)
                self.add(least_s, least_s, [other])

    def _least_s(self, strategy: Strategy, like: Outlook | Candidate) -> float:
        """A sample in another order of work, which saves what is idle."""
        own_s = self.bounds.of(strategy)
        if self.hardware.is_mixed:  # its stages may suit unlike devices better
            return own_s
        busy_s = like.estimate.step_s - like.estimate.idle_s
        return max(own_s, busy_s / strategy.total_batch_size)


def find_candidates(
    result: Candidates,
    request: Request,
    hardware: Hardware,
    precision: Precision,
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Adds the fastest strategies of a request to the `result`, by the pieces of its table: the
    best and `RUNNERS_UP` more. The others are left in it.

    Raises the first error where no form can be sharded, and `CutError` where there are too few
    places to cut.
    """
    table = result.table
    groups: dict[object, list[Strategy]] = {}
    for strategy in open_strategies(result, request, hardware, progress):
        key = strategy.form, strategy.samples, strategy.pp, strategy.inner
        groups.setdefault(key, []).append(strategy)
    if not groups:
        raise _nothing_divides(table, request)
    progress(f"comparing {count_of(sum(map(len, groups.values())), 'layout')}")
    left = Left(request, hardware, precision, Bounds(table, hardware))
    for group in groups.values():
        least_s = min(map(left.bounds.of, group))
        left.add(least_s, least_s / CLOSE, group)
    while left.goes_on(result, result.last_s):
        pass
    for one in result.ranked[:RUNNERS_UP]:  # with the other axis inside
        if min(one.strategy.dp, one.strategy.pp) > 1 and not hardware.is_mixed:
            turned = replace(one.strategy, inner="dp")
            outlook = outlook_of(job_of(table, turned, hardware, precision), request, hardware)
            result.add(turned, price(outlook, request, hardware))
    result.left = left


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
