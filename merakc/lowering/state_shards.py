"""In how many shards each stage keeps its state: every point of the lattice that could be the best
is simulated, on all ranks alike.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from merakc.analysis.buckets import (
    WORTH_SHARE,
    BucketSpec,
    ahead,
    bucket_scales,
    parameters_in_order,
)
from merakc.costs.buckets import bucket_seconds, dp_group
from merakc.costs.ranks import rank_memory_bytes
from merakc.costs.stage import with_state
from merakc.ir.costs import StageCost
from merakc.ir.graph import Graph
from merakc.ir.plan import Plan
from merakc.ir.program import COMPUTES, ActionKind, CollectiveKind
from merakc.ir.state import StateShards, coarse_lattice, lattice
from merakc.lowering.lowered import Lowered
from merakc.lowering.predict import planned_costs
from merakc.lowering.try_out import Steps, try_out
from merakc.machines.cluster import Cluster
from merakc.passes.programs.collectives import rough_touches
from merakc.simulation.held import Peak

# The most dp ranks whose whole lattice of shards is tried.
FINE = 8
# The shards of each stage.
Way = tuple[StateShards, ...]
# What shards of the state are compared by: bytes that a rank lacks, seconds that it waits, how much
# larger than usual buckets are, seconds of communication, and the shards of all stages.
_Waits = tuple[int, float, int, float, Way]
_Counts = Counter[tuple[int, ActionKind]]
_Seconds = Mapping[tuple[str, CollectiveKind], float]


@dataclass(frozen=True, slots=True)
class Chosen:
    """For each stage the shards with which its rank waits least, and those that are the fastest
    where all stages have the same, with the seconds of that step.
    """

    each: Way
    same: Way
    same_s: float


def choose_shards(lowered: Lowered, cluster: Cluster, *, are_open: bool = True) -> Chosen:
    """The shards of each stage with which its rank waits least for dp, of those that fit; where
    they are not open, as they are, in larger buckets where these pay.

    What a rank waits for follows from its own stages. Larger buckets are tried as long as a rank
    waits, and less than before. Among equals the least is communicated, then the least sharded.
    Where nothing fits a rank, what takes the fewest bytes. A way is not simulated with which no
    rank can end before a whole step of another, that fits, or with which each lacks more than with
    another.
    """
    plan = lowered.plan
    trial = _Trial(lowered, cluster)
    keys: list[dict[Way, _Waits]] = [{} for _ in range(plan.pp)]
    worst_s, same = math.inf, (math.inf, _as_they_are(plan))
    ways = _ways(plan, cluster) if are_open else [_as_they_are(plan)]
    buckets: dict[Way, Sequence[object]] = {}
    lacking = {way: trial.lacking(_with_shards(lowered, way)) for way in ways}
    ways = sorted(ways, key=lambda way: sum(lacking[way]))
    if any(map(min, zip(*lacking.values(), strict=True))):  # a rank has no room with any of them
        return Chosen(ways[0], ways[0], math.inf)
    for scale in bucket_scales(max(map(_held_bytes, lowered.stages.local))):
        step_s = math.inf
        for way in ways:
            scaled = tuple(replace(s, bucket_scale=scale if s.optimizer > 1 else 1) for s in way)
            tried = _with_shards(lowered, scaled)
            own_buckets = [bucket.members for own in tried.buckets for bucket in own]
            if own_buckets == buckets.get(way):  # large tensors fill several usual ones
                continue
            buckets[way] = own_buckets
            least = (min(own.values(), default=(math.inf,))[0] for own in keys)
            if all(map(operator.gt, trial.lacking(tried), least)):
                continue
            if min(trial.least_s(tried)) >= same[0]:
                continue
            found_s, waits = trial.run(tried, scale)
            step_s = min(step_s, found_s)
            if not any(lacking for lacking, *_ in waits):
                same = min(same, (found_s, scaled))
            for of_rank, own in zip(keys, waits, strict=True):
                of_rank[scaled] = own
        before_s, worst_s = worst_s, max(min(own.values())[1] for own in keys)
        is_short = any(min(own.values())[0] for own in keys)
        if is_short or (step_s < math.inf and not WORTH_SHARE * step_s < worst_s < before_s):
            break
    best = [min(of_rank, key=of_rank.__getitem__) for of_rank in keys]
    each = tuple(best[rank][stage] for stage, rank in enumerate(plan.rank_of))
    return Chosen(each, same[1], same[0])


class _Trial:
    """A plan whose state is tried in one way after the other: what they have in common."""

    def __init__(self, lowered: Lowered, cluster: Cluster) -> None:
        plan, local = lowered.plan, lowered.stages.local
        self.cluster, self.memory_bytes = cluster, rank_memory_bytes(cluster, plan.mesh)
        self.touches = {s: graph.told(rough_touches) for s, graph in enumerate(local)}
        self.costs = planned_costs(lowered, cluster)
        experts = plan.of_experts
        self.experts = [experts.intersection(i.target for i in graph.inputs) for graph in local]
        self.steps = Steps(lowered)
        self.counts = [
            Counter((a.stage, a.kind) for a in program.actions if a.kind.is_compute)
            for program in self.steps.whole
        ]
        _, simulation = try_out(lowered, cluster, self.costs, steps=self.steps, over_dp=False)
        self.moving_bytes = [_moving_bytes(peak) for peak in simulation.peaks]
        effects = [cost.effects for cost in self.costs]
        self.busy_s = [
            sum(n * effects[s][COMPUTES.index(kind)].seconds for (s, kind), n in counts.items())
            for counts in self.counts
        ]

    def lacking(self, tried: Lowered) -> list[int]:
        """The bytes that each rank lacks at the least."""
        need_bytes = list(self.moving_bytes)
        costs = self.costs_of(tried)
        for rank, cost in zip(tried.plan.rank_of, costs, strict=True):
            need_bytes[rank] += cost.static_bytes
        pairs = zip(need_bytes, self.memory_bytes, strict=True)
        return [max(need - most, 0) for need, most in pairs]

    def costs_of(self, tried: Lowered) -> tuple[StageCost, ...]:
        """The stages' costs with their state in the shards that are tried."""
        plan = tried.plan
        stages = zip(self.costs, tried.stages.local, plan.state_shards, strict=True)
        return tuple(
            with_state(c, graph, own, plan.precision, self._others(plan, stage), plan.on_host)
            for stage, (c, graph, own) in enumerate(stages)
        )

    def _others(self, plan: Plan, stage: int) -> Mapping[str, StateShards]:
        """How experts are sharded."""
        own = plan.shards(stage).within(plan.dp)
        return dict.fromkeys(self.experts[stage], own)

    def run(self, tried: Lowered, scale: int) -> tuple[float, list[_Waits]]:
        """Seconds of the step, and what each rank compares a way by."""
        plan, costs = tried.plan, self.costs_of(tried)
        prediction, simulation = try_out(tried, self.cluster, costs, self.touches, self.steps)
        lacking = (
            max(peak - most, 0)
            for peak, most in zip(prediction.peak_bytes, self.memory_bytes, strict=True)
        )
        waits = (round(seconds, 9) for seconds in prediction.exposed_s)
        each = zip(lacking, waits, simulation.communication_s, strict=True)
        found = [(lack, wait, scale, sent_s, plan.state_shards) for lack, wait, sent_s in each]
        return prediction.step_s, found

    def least_s(self, tried: Lowered) -> Iterator[float]:
        """Seconds after which each rank ends at the earliest: those of its collectives over dp,
        which run one after the other, and of its computes, but for the share that collectives run
        at beside these.
        """
        plan, world = tried.plan, tried.plan.mesh.world_size
        overlap = (self.cluster.sharing or self.cluster.described(world)).beside(world)
        group = dp_group(plan.mesh, self.cluster)
        for busy_s, counts, buckets in zip(self.busy_s, self.counts, tried.buckets, strict=True):
            seconds = bucket_seconds(buckets, group, plan.precision)
            yield (1 - overlap) * busy_s + self._posted_s(counts, buckets, seconds)

    def _posted_s(self, counts: _Counts, buckets: Sequence[BucketSpec], seconds: _Seconds) -> float:
        """Of the collectives that computes start at the least: what they read is gathered, but for
        what may be there before; gradients are scattered, and the last ones reduced.
        """
        posted_s, backwards = 0.0, Counter[str]()
        bucket_of = {p: b for b in buckets if not b.is_shared for p in b.members}
        for (stage, kind), count in counts.items():
            read, made = set[str](), set[str]()
            for touch in self.touches[stage].get((kind, False), ()):
                bucket = bucket_of.get(touch.parameter)
                if bucket is not None and touch.is_gradient:
                    made.add(bucket.name)
                elif bucket is not None and bucket.is_gathered:
                    read.add(bucket.name)
            gathers = sorted(seconds[name, CollectiveKind.GATHER] for name in read)
            posted_s += count * sum(gathers[: -1 - ahead(buckets)])
            backwards.update(dict.fromkeys(made, count))
        for bucket in buckets:
            if count := backwards[bucket.name]:
                posted_s += seconds[bucket.name, CollectiveKind.REDUCE]
                if bucket.shards.gradients > 1:
                    posted_s += (count - 1) * seconds[bucket.name, CollectiveKind.SCATTER]
        return posted_s


def _moving_bytes(peak: Peak) -> int:
    """What a rank holds at its peak beside its state, but for messages: when these have arrived
    depends on what is sent over dp. Nothing is said of a peak behind the last micro-batch.
    """
    return 0 if peak.reduced_bytes else peak.activations_bytes + peak.transient_bytes


def _held_bytes(local: Graph) -> int:
    """Of a stage's parameters as they are updated: in float32 or wider."""
    sizes = (i.spec.numel * max(4, i.spec.dtype.itemsize) for i in local.told(parameters_in_order))
    return sum(sizes)


def _ways(plan: Plan, cluster: Cluster) -> Sequence[Way]:
    """The points of the lattice that are tried, each for all stages."""
    mesh, ranks = plan.mesh, plan.state_ranks
    inside = cluster.described(mesh.world_size).nodes[0].devices // mesh.state_stride
    points = lattice(ranks) if ranks <= FINE else coarse_lattice(ranks, inside)
    return [(shards,) * len(plan.rank_of) for shards in points]


def _with_shards(lowered: Lowered, way: Way) -> Lowered:
    return replace(lowered, plan=replace(lowered.plan, state_shards=way))


def _as_they_are(plan: Plan) -> Way:
    return tuple(plan.shards(stage) for stage in range(len(plan.rank_of)))
