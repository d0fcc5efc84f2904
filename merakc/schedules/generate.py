"""`auto`: a schedule made for the costs of each stage and the memory of each rank.

A portfolio of list schedules (`list_scheduler.py`): how much is recomputed follows from the bytes
that are free (`bound.py`), how fast micro-batches enter from the longest period of a rank, and
both are varied, with the rules that choose among ready work. The best go on in a search over
the same choices, stage by stage, then lose the recomputations that they can do without, and have
works moved along the critical path. The known schedules that fit compete. All of it is counted
in works scheduled, not in seconds, so that every rank that generates a schedule finds the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from merakc.errors import ConfigError
from merakc.ir.schedule import Schedule
from merakc.schedules.bound import can_split, least_recomputation, lower_bound_s
from merakc.schedules.improve import drop_recomputations, fuse_backwards, local_search, makespan_s
from merakc.schedules.list_scheduler import Rules, list_schedule
from merakc.schedules.placement import place
from merakc.schedules.registry import KNOWN
from merakc.schedules.timing import Pipeline, peak_bytes, with_recomputation
from merakc.schedules.work import FORWARD, Work, decode

Orders = list[list[Work]]

# Works that are scheduled, at about 6 microseconds each: half of them to look around.
EFFORT = 1_000_000
# However large the pipeline is, so many list schedules are tried.
MIN_PASSES = 16
# Running a work in the local search takes a fifth of the time, or less, that scheduling it takes.
RUNS_PER_EFFORT = 2
# Each run moves one work alone, so that fewer are not worth beginning.
MIN_RUNS = 200
# With so many micro-batches more than ranks, what a choice is worth shows without the rest.
STEADY_MICRO_BATCHES = 32
# Shares of the memory's byte-seconds that a schedule is hoped to use.
USABLE = (1.0, 0.8, 0.6, 0.5, 0.9, 0.7, 0.4, 0.3)
# How micro-batches enter: how many at once beside the first, in those that the memory could hold
# beyond what it must, and the pace of the others, in periods of the slowest rank; 0: at once.
ENTRIES = ((0.0, 0.0), (1.0, 1.0), (2.0, 1.02), (0.0, 1.0), (0.5, 1.02), (1.5, 1.05))
# Where backwards wait for all forwards, the shares of micro-batches that are recomputed.
SHARES = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
# As many choices as this are scheduled with all micro-batches, fewer where that takes more works
# than half of the effort, but so many of them at least, which are also improved.
MAX_FULL = 16
FINALISTS = 4
# What is at the lower bound is not searched on, but for rounding.
AT_BOUND = 1 + 1e-9
# The share of its effort that a search goes on for without finding anything shorter.
STALE = 0.5


@dataclass(frozen=True, slots=True)
class Generated:
    """A schedule for `pipeline`; `method` names what found it, `bound_s` what none can beat."""

    schedule: Schedule
    pipeline: Pipeline
    makespan_s: float
    bound_s: float
    method: str


@dataclass(frozen=True, slots=True)
class Found:
    """Orders of a pipeline, their makespan, and what found them."""

    makespan_s: float
    method: str
    pipeline: Pipeline
    orders: Orders


@dataclass(frozen=True, slots=True)
class Choice:
    """A point of the search: the rules, the pace in periods, and each stage's recomputed share."""

    rules: Rules
    pace: float
    shares: tuple[float, ...]


def generate(
    pipelines: Sequence[Pipeline],
    capacity_bytes: Sequence[float],
    *,
    split: bool = True,
    effort: int = EFFORT,
) -> Generated:
    """The shortest schedule found for one of the pipelines, within each rank's capacity.

    The pipelines are placements of one model to choose from, on the same ranks, with the same
    micro-batches; `capacity_bytes` are what each rank may hold at its highest point, static
    bytes included. Backwards are split where `split` allows it and the costs say how.

    Raises `ConfigError` where no schedule fits, with the rank that is the shortest of memory.
    """
    assert pipelines, "no pipeline to schedule"
    found: list[Found] = []
    searches = []
    for pipeline in pipelines:
        known = [*known_schedules(pipeline, capacity_bytes, split)]
        found += known
        search = _Search(pipeline, capacity_bytes, split and can_split(pipeline.costs))
        if search.short is pipeline:
            search.best_s = min((one.makespan_s for one in known), default=inf)
        search.look_around(effort / 2 / len(pipelines))
        searches.append(search)
    # The other half of the effort goes where it is most likely to pay.
    searches.sort(key=lambda search: search.best_s)
    searches[0].climb(effort / 2)
    for search in searches:
        found += search.finalists(effort / 2 / len(pipelines))
    if not found:
        raise ConfigError(_too_little(pipelines[0], capacity_bytes))
    found = sorted(found, key=lambda f: f.makespan_s)[:FINALISTS]
    best = min((_polish(f, capacity_bytes, effort) for f in found), key=lambda f: f.makespan_s)
    m = best.pipeline.micro_batches
    return Generated(
        schedule=decode("auto", best.pipeline.rank_of, best.orders, m),
        pipeline=best.pipeline,
        makespan_s=best.makespan_s,
        bound_s=min(lower_bound_s(p, capacity_bytes) for p in pipelines),
        method=best.method,
    )


def known_schedules(
    pipeline: Pipeline, capacity_bytes: Sequence[float], split: bool = True
) -> Iterator[Found]:
    """The known schedules of this placement that fit, with and without recomputation."""
    m, stages, ranks = pipeline.micro_batches, pipeline.stages, pipeline.ranks
    for name, known in KNOWN.items():
        virtual_stages = stages // ranks
        splits = known.splits_backward
        if virtual_stages not in known.virtual_stages or (
            splits and not (split and can_split(pipeline.costs))
        ):
            continue
        if place(known.placement, ranks, virtual_stages) != pipeline.rank_of:
            continue
        plain = known.make(ranks, m, virtual_stages)
        if pipeline.head_s is not None:
            plain = [sorted(order, key=lambda work: work[0] != FORWARD) for order in plain]
        for recomputed in (0, stages - 1, stages):
            orders = with_recomputation(plain, range(recomputed * m))
            if fits(pipeline, orders, capacity_bytes):
                yield Found(makespan_s(pipeline, orders), name, pipeline, orders)


def fits(pipeline: Pipeline, orders: Orders, capacity_bytes: Sequence[float]) -> bool:
    """Whether no rank ever holds more than its capacity."""
    return all(
        peak_bytes(pipeline, rank, order) <= capacity_bytes[rank]
        for rank, order in enumerate(orders)
    )


@dataclass(slots=True)
class _Search:
    """One pipeline, and the choices tried on it."""

    pipeline: Pipeline
    capacity_bytes: Sequence[float]
    split: bool
    effort: float = 0.0  # works that may still be scheduled
    best_s: float = inf  # the shortest makespan so far
    tried: dict[Choice, float] = field(default_factory=dict)
    short: Pipeline = field(init=False)  # with as many micro-batches as choices are tried on
    bound_s: float = field(init=False)  # of its makespan

    def __post_init__(self) -> None:
        p = self.pipeline
        m = min(p.micro_batches, p.ranks + STEADY_MICRO_BATCHES)
        # Where all micro-batches are alive at once, fewer say nothing of the memory.
        is_short = m < p.micro_batches and p.head_s is None
        self.short = replace(p, micro_batches=m) if is_short else p
        self.bound_s = lower_bound_s(self.short, self.capacity_bytes)

    @property
    def ended(self) -> bool:
        """Whether the effort is spent, or nothing shorter can be."""
        return self.effort <= 0.0 or self.best_s <= self.bound_s * AT_BOUND

    def look_around(self, effort: float) -> None:
        """Tries a grid of choices, then the rules on the best of them."""
        self._allow(effort)
        rules = Rules(split=self.split)
        for choice in self._grid(rules):
            if self.ended:
                return
            self._try(choice)
        for choice in self._best(2):
            for max_pending in (0.0, 2.0, inf):
                for oldest_first in (True, False):
                    rules = replace(
                        choice.rules, max_pending=max_pending, oldest_first=oldest_first
                    )
                    if self.ended:
                        return
                    self._try(replace(choice, rules=rules))

    def _grid(self, rules: Rules) -> Iterable[Choice]:
        stages = self.pipeline.stages
        for last in (0.0, 1.0):
            yield Choice(rules, 0.0, (1.0,) * (stages - 1) + (last,))
        if self.pipeline.head_s is not None:
            for share in SHARES:
                yield Choice(rules, 0.0, (share,) * stages)
            return
        plans = [least_recomputation(self.pipeline, self.capacity_bytes, u) for u in USABLE]
        for more, pace in ENTRIES:
            for plan in plans:
                burst = 1 + min(self.pipeline.ranks * 2, round(more * plan.spare))
                yield Choice(replace(rules, burst=burst), pace, plan.shares)

    def climb(self, effort: float) -> None:
        """Varies the best choice in one to three things at a time, until the effort is spent or
        nothing shorter comes any more.
        """
        first = self._best(1)
        if not first:
            return
        self._allow(effort)
        draw = random.Random(0)
        now, now_s = first[0], self.tried[first[0]]
        most, found_at = STALE * self.effort, self.effort
        while not self.ended and found_at - self.effort < most:
            choice = now
            for _ in range(draw.choice((1, 1, 2, 3))):
                choice = _vary(choice, self.short, draw)
            seconds = self._try(choice)
            self.effort -= 1.0  # of what was tried before, too
            if seconds < now_s:
                found_at = self.effort
            if seconds <= now_s:
                now, now_s = choice, seconds

    def finalists(self, effort: float) -> Iterator[Found]:
        """The best choices, scheduled with all micro-batches: one of each makespan.

        What is as short with few micro-batches mostly is so in the same way; with many, the next
        longer choice may have the shorter period.
        """
        works = 3 * self.pipeline.stages * self.pipeline.micro_batches
        count = max(FINALISTS, min(MAX_FULL, int(effort / works)))
        distinct: dict[float, Choice] = {}
        for choice in self._best(len(self.tried)):
            distinct.setdefault(self.tried[choice], choice)
        for choice in list(distinct.values())[:count]:
            orders = self._schedule(choice, self.pipeline)
            if orders is not None:
                seconds = makespan_s(self.pipeline, orders)
                yield Found(seconds, "list scheduling", self.pipeline, orders)

    def _allow(self, effort: float) -> None:
        p = self.short
        self.effort = max(effort, MIN_PASSES * 3 * p.stages * p.micro_batches)

    def _best(self, count: int) -> list[Choice]:
        fitting = [choice for choice in self.tried if self.tried[choice] < inf]
        return sorted(fitting, key=lambda choice: self.tried[choice])[:count]

    def _try(self, choice: Choice) -> float:
        if choice not in self.tried:
            orders = self._schedule(choice, self.short)
            self.tried[choice] = seconds = makespan_s(self.short, orders) if orders else inf
            self.best_s = min(self.best_s, seconds)
        return self.tried[choice]

    def _schedule(self, choice: Choice, pipeline: Pipeline) -> Orders | None:
        m = pipeline.micro_batches
        units = {s * m + j for s, share in enumerate(choice.shares) for j in _spread(m, share)}
        rules = replace(choice.rules, pace_s=choice.pace * _period_s(pipeline, choice))
        self.effort -= 3 * pipeline.stages * m + len(units)
        return list_schedule(pipeline, self.capacity_bytes, rules, units)


def _period_s(pipeline: Pipeline, choice: Choice) -> float:
    """The seconds per micro-batch of the slowest rank."""
    period_s = [0.0] * pipeline.ranks
    for c, rank, share in zip(pipeline.costs, pipeline.rank_of, choice.shares, strict=True):
        halves_s = c.input_grad_s + c.weight_grad_s
        backward_s = halves_s if choice.rules.split else c.backward_s
        period_s[rank] += c.forward_s + backward_s + share * c.recompute_s
    return max(period_s)


def _vary(choice: Choice, pipeline: Pipeline, draw: random.Random) -> Choice:
    """The choice with one thing changed."""
    rules, m, stages = choice.rules, pipeline.micro_batches, pipeline.stages
    match draw.choice("nnsssrbpwok"):
        case "n":
            limits = list(rules.max_in_flight or (m,) * stages)
            stage = draw.randrange(stages)
            most = min(m, 2 * pipeline.ranks)
            step = draw.choice((-2, -1, 1, 2))
            limits[stage] = max(1, limits[stage] + step if limits[stage] < m else most)
            limits[stage] = draw.randint(1, most) if draw.random() < 0.3 else limits[stage]
            return replace(choice, rules=replace(rules, max_in_flight=tuple(limits)))
        case "s" | "r":
            more = draw.choice((-1.0, -0.5, -0.25, -0.125, 0.125, 0.25, 0.5, 1.0))
            stage = draw.randrange(stages)
            near = {stage} if draw.random() < 0.7 else {stage - 1, stage, stage + 1}
            shares = tuple(
                min(1.0, max(0.0, x + more)) if s in near else x
                for s, x in enumerate(choice.shares)
            )
            return replace(choice, shares=shares)
        case "b":
            burst = max(1, rules.burst + draw.choice((-1, 1)))
            return replace(choice, rules=replace(rules, burst=burst))
        case "p":
            pace = draw.choice((0.0, 1.0, 1.03, 1.06, choice.pace * 0.97, choice.pace * 1.03))
            return replace(choice, pace=pace)
        case "w":
            pending = draw.choice((0.0, 1.0, 2.0, 3.0, 4.0, inf))
            return replace(choice, rules=replace(rules, max_pending=pending))
        case "o":
            return replace(choice, rules=replace(rules, oldest_first=not rules.oldest_first))
        case _:
            patience = draw.choice((0.0, 0.3, 0.5, 1.0))
            return replace(choice, rules=replace(rules, patience=patience))


def _spread(micro_batches: int, share: float) -> Iterator[int]:
    """So large a share of the micro-batches, spread evenly."""
    count = round(share * micro_batches)
    return (
        j
        for j in range(micro_batches)
        if j * count // micro_batches != (j + 1) * count // micro_batches
    )


def _polish(found: Found, capacity_bytes: Sequence[float], effort: int) -> Found:
    """The orders without needless recomputations, searched locally where they are small."""
    pipeline = found.pipeline
    best = found
    orders = drop_recomputations(pipeline, found.orders, capacity_bytes)
    tries = [("", orders), ("", fuse_backwards(pipeline, orders))]
    runs = RUNS_PER_EFFORT * effort // max(1, FINALISTS * sum(map(len, orders)))
    if runs >= MIN_RUNS:
        bound_s = lower_bound_s(pipeline, capacity_bytes)
        searched = local_search(pipeline, orders, capacity_bytes, runs, bound_s)
        tries.append((", searched locally", searched))
    for how, tried in tries:
        seconds = makespan_s(pipeline, tried)
        if seconds < best.makespan_s and fits(pipeline, tried, capacity_bytes):
            best = replace(best, makespan_s=seconds, orders=tried, method=found.method + how)
    return best


def _too_little(pipeline: Pipeline, capacity_bytes: Sequence[float]) -> str:
    """Which rank is the shortest of memory, even for one micro-batch, recomputed."""
    needs = []
    for rank, capacity in enumerate(capacity_bytes):
        holders = zip(pipeline.costs, pipeline.rank_of, strict=True)
        own = [cost for cost, holder in holders if holder == rank]
        static = sum(c.static_bytes for c in own)
        once = max(min(c.saved_bytes, c.saved_bytes - c.checkpoint_bytes) for c in own)
        need = static + once + sum(min(c.checkpoint_bytes, c.saved_bytes) for c in own)
        need += max(0, *(c.backward_peak_bytes for c in own))
        needs.append((need / max(capacity, 1.0), rank, need, static))
    _, rank, need, static = max(needs)
    return (
        f"schedule auto: nothing fits; rank {rank} may hold {capacity_bytes[rank]:.0f} bytes, and "
        f"one micro-batch takes {need}, of which {static} are parameters and their state; use "
        f"smaller micro-batches, more ranks or more memory"
    )
