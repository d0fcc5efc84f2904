"""What the blocks of stages keep, so that ranks stay within a budget of bytes.

Each stage's chain of blocks is solved by itself (`merakc.passes.recompute.solve`); what that
expects is then held against the prediction of the graphs that follow, and solved again with as much
less as a rank was over.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from merakc.costs.device import Place, place_on
from merakc.costs.ranks import rank_memory_bytes, stage_devices
from merakc.costs.work.keep import in_flight
from merakc.errors import FitError
from merakc.ir.plan_file import Prediction
from merakc.ir.program import StageGraphs
from merakc.ir.recompute import Budget, Keep, Run, format_runs
from merakc.lowering.lowered import Lowered
from merakc.lowering.predict import planned_costs
from merakc.lowering.try_out import Steps, try_out
from merakc.machines.cluster import Cluster
from merakc.passes.autodiff.shorten import graph_form
from merakc.passes.pipeline import called_pieces, uniform
from merakc.passes.recompute.costs import BlockCost, block_costs
from merakc.passes.recompute.solve import least_bytes, solve
from merakc.report.units import format_bytes

# How often a choice is held against its prediction, and the share of a budget that may be left.
ROUNDS, LEFT = 8, 0.01


def within_budget(lowered: Lowered, cluster: Cluster, budget: Budget | None = None) -> Lowered:
    """The plan, with its prediction, whose stages keep what makes it fastest in a budget for each
    rank: without one, that of the cluster's memory. Of what fits no budget, that of least bytes.

    Raises `FitError` where a budget that is given cannot be kept.
    """
    cluster = cluster.with_hardware(lowered.plan.mesh.world_size)
    found = _Chosen(lowered, cluster)
    limits = _limits(found, cluster, budget)
    best = _fastest(found, limits)
    made = found.in_full(best)
    if _lacks(best, limits) <= 0 < _lacks(made, limits):
        found.over_dp = True  # beside collectives messages arrive later
        made = _fastest(found, limits)
    if budget is not None and _lacks(made, limits) > 0:
        least = max(_prediction(made).peak_bytes)
        raise FitError(
            f"a rank needs {format_bytes(least)} at the least, and {budget} that recompute asks "
            f"for is {format_bytes(min(limits))}; give a larger one (auto: what the device has), "
            "smaller micro-batches, or shard the state"
        )
    return made


def _fastest(found: _Chosen, limits: Sequence[int]) -> Lowered:
    """What takes least time within these limits of the ranks, or else fewest bytes."""
    everything = found.everything()
    if _lacks(everything, limits) <= 0:
        return everything
    ranks = [_Rank(most, most - own) for most, own in zip(limits, found.static_bytes, strict=True)]
    fit = list[Lowered]()
    for _ in range(ROUNDS):
        made = found.within([rank.free for rank in ranks])
        peaks = _prediction(made).peak_bytes
        fit += [made] if _lacks(made, limits) <= 0 else []
        again = [rank.goes_on(peak) for rank, peak in zip(ranks, peaks, strict=True)]
        if not any(again):
            break
    if not fit:  # all at once
        made = found.within([rank.low for rank in ranks])
        fit += [made] if _lacks(made, limits) <= 0 else []
    return min(fit, key=_seconds, default=None) or _least(
        [found.within([0] * len(limits)), found.full()], limits
    )


@dataclass(slots=True)
class _Rank:
    """What a rank's stages may keep for micro-batches: `free` bytes are tried next. With `low` it
    was within its limit, with `high` it was not.
    """

    limit_bytes: int
    free: int
    low: int = 0
    high: float = math.inf
    peak_bytes: int = 0  # of the last round

    def goes_on(self, peak_bytes: int) -> bool:
        """Takes what came of a round; whether another number of bytes is to be tried."""
        over, before, self.peak_bytes = peak_bytes - self.limit_bytes, self.peak_bytes, peak_bytes
        if over <= 0:
            self.low = max(self.low, self.free)
        else:
            self.high = min(self.high, self.free)
        if -LEFT * self.limit_bytes <= over <= 0:
            return False
        last, self.free = self.free, self.free - over
        # As much less as it was over may change nothing: then half way to what was within.
        if peak_bytes == before or not self.low < self.free < self.high:
            known = self.high if self.high < math.inf else self.free
            self.free = int(self.low + known) // 2
        return self.free != last


def _limits(found: _Chosen, cluster: Cluster, budget: Budget | None) -> Sequence[int]:
    if budget is None:
        return rank_memory_bytes(cluster, found.lowered.plan.mesh)
    if budget.size_bytes is not None:
        return [budget.size_bytes] * len(found.static_bytes)
    whole = _prediction(found.everything()).peak_bytes
    return [
        static + int(budget.share * (peak - static))
        for static, peak in zip(found.static_bytes, whole, strict=True)
    ]


def _least(found: Sequence[Lowered], limits: Sequence[int]) -> Lowered:
    return min(found, key=lambda one: _lacks(one, limits))


def _lacks(one: Lowered, limits: Sequence[int]) -> int:
    peaks = _prediction(one).peak_bytes
    return max(peak - limit for peak, limit in zip(peaks, limits, strict=True))


def _prediction(lowered: Lowered) -> Prediction:
    assert lowered.prediction is not None
    return lowered.prediction


def _seconds(lowered: Lowered) -> float:
    return _prediction(lowered).step_s


@dataclass(frozen=True, slots=True)
class _Alike:
    """What stages of one form have in common: the costs of their blocks, and what all layers made
    again are.
    """

    costs: tuple[BlockCost, ...]
    full: tuple[Run, ...]

    @property
    def kept(self) -> tuple[Run, ...]:
        """All is kept."""
        return (Run(Keep.KEPT, max(len(self.costs), 1)),)


class _Chosen:
    """The stages of a plan, and what they may keep: without collectives over dp, unless `over_dp`
    is set, on which memory hardly depends.
    """

    over_dp = False

    def __init__(self, lowered: Lowered, cluster: Cluster) -> None:
        self.lowered = replace(lowered, plan=replace(lowered.plan, recompute="budget"))
        self.cluster, plan = cluster, lowered.plan
        self.steps = Steps(lowered)
        self.solved: dict[tuple[int, int, int], tuple[Run, ...]] = {}
        self.known: dict[tuple[tuple[str, ...], bool], Lowered] = {}
        self.flying = [in_flight(lowered.schedule, s) for s in range(len(plan.rank_of))]
        devices = stage_devices(cluster, plan.mesh, plan.rank_of)
        known: dict[object, _Alike] = {}
        self.stages: list[_Alike] = []
        for local, device in zip(lowered.stages.local, devices, strict=True):
            key = graph_form(local)[0], device
            if key not in known:
                stage = local.told(called_pieces)
                known[key] = _alike(stage, place_on(cluster, plan.tp, device, cp=plan.cp))
            self.stages.append(known[key])
        costs = planned_costs(self.everything(), cluster)
        self.static_bytes = [0] * plan.pp
        self.saved = [cost.saved_bytes for cost in costs]
        for cost, rank in zip(costs, plan.rank_of, strict=True):
            self.static_bytes[rank] += cost.static_bytes

    def everything(self) -> Lowered:
        """Nothing is made again."""
        return self._planned([one.kept for one in self.stages])

    def full(self) -> Lowered:
        """Every layer is made again."""
        return self._planned([one.full for one in self.stages])

    def within(self, free_bytes: Sequence[int]) -> Lowered:
        """What is fastest with so many bytes of each rank for its micro-batches, or takes least."""
        rank_of = self.lowered.plan.rank_of
        saved = [n * size for n, size in zip(self.flying, self.saved, strict=True)]
        chosen: list[tuple[Run, ...]] = []
        for stage, own in enumerate(self.stages):
            of_rank = [s for s, rank in enumerate(rank_of) if rank == rank_of[stage]]
            share = saved[stage] / max(sum(saved[s] for s in of_rank), 1)
            budget = int(max(free_bytes[rank_of[stage]], 0) * share)
            key = id(own), budget, self.flying[stage]
            if key not in self.solved:
                self.solved[key] = _within(own, budget, self.flying[stage])
            chosen.append(self.solved[key])
        return self._planned(chosen)

    def in_full(self, lowered: Lowered) -> Lowered:
        """Such a plan with the collectives over dp in its prediction."""
        return replace(lowered, prediction=try_out(lowered, self.cluster, steps=self.steps)[0])

    def _planned(self, chosen: Sequence[tuple[Run, ...]]) -> Lowered:
        texts = tuple(map(format_runs, chosen))
        key = texts, self.over_dp
        if key not in self.known:
            plan = replace(self.lowered.plan, kept_blocks=texts)
            made = replace(self.lowered, plan=plan)
            tried = try_out(made, self.cluster, steps=self.steps, over_dp=self.over_dp)
            self.known[key] = replace(made, prediction=tried[0])
        return self.known[key]


def _within(own: _Alike, budget_bytes: int, in_flight: int) -> tuple[Run, ...]:
    """What a stage keeps in a budget for its micro-batches in flight, or what takes least."""
    found = solve(own.costs, budget_bytes, in_flight)
    if found is None:
        found = solve(own.costs, least_bytes(own.costs, in_flight), in_flight)
    return own.kept if found is None or not own.costs else found.runs


def _alike(stage: StageGraphs, place: Place) -> _Alike:
    if stage.backward is None:
        return _Alike((), (Run(Keep.KEPT, 1),))
    return _Alike(block_costs(stage, place), uniform(stage, "full"))
