"""The shortest schedule of a small pipeline, by constraint programming (OR-tools CP-SAT).

For a handful of ranks and micro-batches, to know how far the heuristics are from the optimum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from importlib import import_module
from math import ceil, gcd, lcm
from typing import Any

from merakc.ir.schedule import Schedule
from merakc.schedules.bound import can_split
from merakc.schedules.generate import EFFORT, generate
from merakc.schedules.improve import fuse_backwards, makespan_s
from merakc.schedules.timing import Pipeline
from merakc.schedules.work import (
    FORWARD,
    INPUT_GRAD,
    RECOMPUTE,
    WEIGHT_GRAD,
    Work,
    decode,
)

# Seconds are counted in whole ticks; finer ones than these are rounded to, and nothing is proved.
MAX_TICKS_PER_S = 10_000


@dataclass(frozen=True, slots=True)
class Exact:
    """The best schedule found, and the makespan below which there is none with ascending orders.

    `bound_s` counts whole backwards as their halves, and is 0 where durations had to be rounded.
    """

    schedule: Schedule
    makespan_s: float
    bound_s: float

    @property
    def is_optimal(self) -> bool:
        """Whether nothing shorter exists."""
        return self.makespan_s <= self.bound_s * (1 + 1e-9)


def solve_exactly(
    pipeline: Pipeline,
    capacity_bytes: Sequence[float],
    limit_s: float = 60.0,
    effort: int = EFFORT,
) -> Exact:
    """Searches for the shortest schedule of the pipeline for so long, from `generate`'s on.

    Micro-batches ascend in every stage, as they do in all known schedules. Temporary bytes are
    not modelled: capacities are compared with static and kept bytes.

    Raises `ConfigError` where nothing fits.
    """
    cp_model = import_module("ortools.sat.python.cp_model")  # which takes a second
    assert can_split(pipeline.costs), "exact schedules split backwards"
    start = generate([pipeline], capacity_bytes, effort=effort)
    model = _Model(cp_model, pipeline, capacity_bytes, start.makespan_s)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.num_workers = 1  # the same answer on every machine, if given the time
    status = solver.Solve(model.model)
    bound_s = solver.BestObjectiveBound() / model.ticks_per_s if model.is_exact else 0.0
    m = pipeline.micro_batches
    best = start.schedule, start.makespan_s
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        orders = model.orders(solver)
        for found in (orders, fuse_backwards(pipeline, orders)):
            if (seconds := makespan_s(pipeline, found)) < best[1]:
                best = decode("exact", pipeline.rank_of, found, m), seconds
    elif status == cp_model.INFEASIBLE:  # nothing is shorter than what it was told to beat
        bound_s = start.makespan_s if model.is_exact else 0.0
    return Exact(*best, bound_s)


class _Model:
    """Starts of all works, in ticks; which units are recomputed; the makespan."""

    def __init__(
        self, cp_model: Any, pipeline: Pipeline, capacity_bytes: Sequence[float], known_s: float
    ) -> None:
        self.pipeline, self.model = pipeline, cp_model.CpModel()
        seconds = pipeline.seconds
        every = [s for kind in (FORWARD, *_GRADS, RECOMPUTE) for s in seconds[kind]]
        exact = lcm(*(Fraction(s).limit_denominator(1000).denominator for s in every))
        links = pipeline.link_s
        exact = lcm(exact, *(Fraction(s).limit_denominator(1000).denominator for s in links))
        self.ticks_per_s = min(exact, MAX_TICKS_PER_S)
        self.is_exact = all(abs(t * self.ticks_per_s % 1) < 1e-9 for t in (*every, *links))
        self.ticks = [[ceil(s * self.ticks_per_s - 1e-9) for s in row] for row in seconds]
        self.links = [ceil(s * self.ticks_per_s - 1e-9) for s in links]
        # Only what is shorter than the known schedule is of use; rounded up, it may look longer.
        known = known_s * self.ticks_per_s
        self.horizon = ceil(known - 1e-6) - 1 if self.is_exact else int(known * 1.2)
        self.starts: dict[Work, Any] = {}
        self.again: dict[int, Any] = {}
        units = range(pipeline.stages * pipeline.micro_batches)
        for unit in units:
            for kind in (FORWARD, *_GRADS, RECOMPUTE):
                self.starts[kind, unit] = self.model.NewIntVar(0, self.horizon, "")
            self.again[unit] = self.model.NewBoolVar("")
        for unit in units:
            self._order_unit(unit)
        for rank, capacity in enumerate(capacity_bytes):
            self._share_rank(rank, capacity)
        end = self.model.NewIntVar(0, self.horizon, "")
        self.model.AddMaxEquality(end, [self._end(WEIGHT_GRAD, unit) for unit in units])
        self.model.Minimize(end)

    def _end(self, kind: int, unit: int) -> Any:
        stage = unit // self.pipeline.micro_batches
        return self.starts[kind, unit] + self.ticks[kind][stage]

    def _order_unit(self, unit: int) -> None:
        model, start, again = self.model, self.starts, self.again[unit]
        m, last = self.pipeline.micro_batches, self.pipeline.stages - 1
        stage, j = divmod(unit, m)
        model.Add(start[INPUT_GRAD, unit] >= self._end(FORWARD, unit))
        model.Add(start[WEIGHT_GRAD, unit] >= self._end(INPUT_GRAD, unit))
        model.Add(start[RECOMPUTE, unit] >= self._end(FORWARD, unit)).OnlyEnforceIf(again)
        model.Add(start[INPUT_GRAD, unit] >= self._end(RECOMPUTE, unit)).OnlyEnforceIf(again)
        model.Add(start[RECOMPUTE, unit] == start[FORWARD, unit]).OnlyEnforceIf(again.Not())
        if stage < last:
            link = self.links[stage]
            model.Add(start[FORWARD, unit + m] >= self._end(FORWARD, unit) + link)
            model.Add(start[INPUT_GRAD, unit] >= self._end(INPUT_GRAD, unit + m) + link)
        if j:
            for kind in (FORWARD, *_GRADS):
                model.Add(start[kind, unit] >= self._end(kind, unit - 1))
            earlier = start[RECOMPUTE, unit - 1]
            model.Add(start[RECOMPUTE, unit] >= earlier).OnlyEnforceIf(again, self.again[unit - 1])

    def _share_rank(self, rank: int, capacity: float) -> None:
        """One work at a time, and no more bytes than there are."""
        model, costs, m = self.model, self.pipeline.costs, self.pipeline.micro_batches
        works, held, held_bytes = [], [], []
        for unit in self._units(rank):
            stage = unit // m
            cost = costs[stage]
            for kind in (FORWARD, *_GRADS):
                start, ticks = self.starts[kind, unit], self.ticks[kind][stage]
                works.append(model.NewFixedSizeIntervalVar(start, ticks, ""))
            start, ticks = self.starts[RECOMPUTE, unit], self.ticks[RECOMPUTE][stage]
            again = self.again[unit]
            works.append(model.NewOptionalFixedSizeIntervalVar(start, ticks, again, ""))
            # Checkpoint and deferred bytes may overlap; what is in both is counted once.
            begins = self.starts[FORWARD, unit], self.starts[RECOMPUTE, unit]
            ends = self._end(INPUT_GRAD, unit), self._end(WEIGHT_GRAD, unit)
            kept = min(cost.checkpoint_bytes, cost.deferred_bytes)
            parts = (
                (begins[0], ends[1], kept),
                (begins[0], ends[0], cost.checkpoint_bytes - kept),
                (begins[1], ends[1], cost.deferred_bytes - kept),
                (
                    begins[1],
                    ends[0],
                    cost.saved_bytes - cost.checkpoint_bytes - cost.deferred_bytes + kept,
                ),
            )
            for begin, end, size in parts:
                if size > 0:
                    length = model.NewIntVar(0, self.horizon, "")
                    held.append(model.NewIntervalVar(begin, length, end, ""))
                    held_bytes.append(size)
        static = sum(costs[s].static_bytes for s in self._stages(rank))
        model.AddNoOverlap(works)
        unit_bytes = max(1, gcd(*held_bytes))  # small numbers are quicker to solve with
        free = max(0, int(capacity - static)) // unit_bytes
        model.AddCumulative(held, [size // unit_bytes for size in held_bytes], free)

    def _stages(self, rank: int) -> list[int]:
        return [s for s, holder in enumerate(self.pipeline.rank_of) if holder == rank]

    def _units(self, rank: int) -> Iterator[int]:
        m = self.pipeline.micro_batches
        return (s * m + j for s in self._stages(rank) for j in range(m))

    def orders(self, solver: Any) -> list[list[Work]]:
        """The solution as orders."""
        found = []
        for rank in range(self.pipeline.ranks):
            works = [(kind, u) for u in self._units(rank) for kind in (FORWARD, *_GRADS)]
            works += [(RECOMPUTE, u) for u in self._units(rank) if solver.Value(self.again[u])]
            found.append(
                sorted(
                    works, key=lambda work: (solver.Value(self.starts[work]), _STEPS.index(work[0]))
                )
            )
        return found


_GRADS = (INPUT_GRAD, WEIGHT_GRAD)
_STEPS = (FORWARD, RECOMPUTE, *_GRADS)  # of one unit, also where some take no time
