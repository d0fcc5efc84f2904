"""What a plan that is one of many should cost: its step is simulated with fewer micro-batches where
others take as long as these.

The plan that is chosen in the end is predicted in full (`merakc.lowering.predict`): the two differ
by less than a hundred-millionth of the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property

from merakc.ir.costs import StageCost
from merakc.ir.plan_file import Prediction
from merakc.ir.program import ActionKind, Program
from merakc.lowering.lowered import Lowered
from merakc.lowering.predict import cost_table, planned_costs, prediction_of
from merakc.machines.cluster import Cluster
from merakc.passes.programs.collectives import Touches
from merakc.simulation.faults import verify_programs
from merakc.simulation.simulate import Simulation, simulate
from merakc.simulation.steady import LeftOut, UnsteadyError

# Behind how many micro-batches a rank periods are looked at, one after the other.
WARM = (2, 4, 8)
# A step is simulated whole where the short one is no shorter than that share of it.
WORTH = 0.6
_Step = tuple[tuple[Program, ...], LeftOut | None]


class Steps:
    """The verified Programs of a plan's step, of one dp rank, without collectives over dp."""

    def __init__(self, lowered: Lowered) -> None:
        self.lowered = lowered
        self._left = list(self._ways_to_leave_out())
        self._known: dict[LeftOut, tuple[Program, ...]] = {}
        self._placed: tuple[object, tuple[Program, ...], object] = None, (), None

    def __iter__(self) -> Iterator[_Step]:
        """With micro-batches left out, where that may be; then all. What is gone on from is not
        tried again.
        """
        while self._left:
            left_out = self._left[0]
            if left_out not in self._known:
                self._known[left_out] = self._without(left_out)
            yield self._known[left_out], left_out
            del self._left[0]
        yield self.whole, None

    def placed(
        self, lowered: Lowered, programs: tuple[Program, ...], touches: Mapping[int, Touches] | None
    ) -> tuple[Program, ...]:
        """Such Programs with their collectives over dp, which depend on the shards of the state."""
        key = id(programs), id(touches), lowered.plan.state_shards, lowered.plan.on_host
        if self._placed[0] != key:
            # With the touches themselves: others might get the id of some that were gone.
            self._placed = key, lowered.with_collectives(programs, touches), touches
        return self._placed[1]

    @cached_property
    def whole(self) -> tuple[Program, ...]:
        """Those of all micro-batches."""
        return self._programs(self.lowered)

    def _ways_to_leave_out(self) -> Iterator[LeftOut]:
        """The shorter step first."""
        plan = self.lowered.plan
        if plan.order or self.lowered.head_stage is not None:
            return
        # The stages of a rank take turns on as many micro-batches as there are ranks. Where ranks
        # wait for each other, as many may pass until all is the same again as are on their way.
        several, ahead = len(plan.rank_of) > plan.pp, self._ahead()
        ends = [(t.source_stage, t.target_stage) for t in self.lowered.stages.transfers]
        reach = max((ahead[source] - ahead[target] for source, target in ends), default=0)
        for count in WARM:
            period = plan.pp if several else max(ahead) if count > WARM[0] else 1
            first = count * plan.pp
            # The stages of a rank may begin a period in turn.
            alike = 1 + max(1, math.ceil(reach / period)) + several
            periods = (plan.micro_batches - first - plan.pp) // period - alike - 1  # to be sure
            if periods * period > (1 - WORTH) * plan.micro_batches:
                yield LeftOut(first, period, periods, alike)

    def _ahead(self) -> list[int]:
        """How many micro-batches the forward of a stage is ahead of its backward, by stage."""
        plan = self.lowered.plan
        count = min(plan.micro_batches, WARM[0] * len(plan.rank_of))
        few = replace(plan, micro_batches=count, batch_size=count * plan.samples)
        found = [0] * len(plan.rank_of)
        for order in replace(self.lowered, plan=few).schedule.orders:
            backward: set[int] = set()
            for action in order:
                backward |= {action.stage} if action.kind.sends_gradients else set()
                ahead = action.kind is ActionKind.FORWARD and action.stage not in backward
                found[action.stage] += ahead
        return found

    def _without(self, left_out: LeftOut) -> tuple[Program, ...]:
        plan = self.lowered.plan
        left = plan.micro_batches - left_out.periods * left_out.period
        fewer = replace(plan, micro_batches=left, batch_size=left * plan.samples)
        return self._programs(replace(self.lowered, plan=fewer))

    def _programs(self, lowered: Lowered) -> tuple[Program, ...]:
        mesh = lowered.plan.mesh
        programs = lowered.programs(ranks=[mesh.rank(0, r, 0) for r in range(mesh.pp)])
        verify_programs(programs, head=lowered.head_stage)
        return programs


def try_out(
    lowered: Lowered,
    cluster: Cluster,
    costs: tuple[StageCost, ...] | None = None,
    touches: Mapping[int, Touches] | None = None,
    steps: Steps | None = None,
    *,
    over_dp: bool = True,
) -> tuple[Prediction, Simulation]:
    """As `merakc.lowering.predict.predict` of one dp rank, without events; the collectives over dp
    are not verified, or left out where `over_dp` is false. `steps` are the plan's, where they are
    known.
    """
    if costs is None:
        cluster = cluster.with_hardware(lowered.plan.mesh.world_size)
        costs = planned_costs(lowered, cluster)
    table = cost_table(lowered, cluster, costs)
    steps = steps or Steps(lowered)
    for programs, left_out in steps:
        placed = steps.placed(lowered, programs, touches) if over_dp else programs
        try:
            simulation = simulate(
                placed, table, head=lowered.head_stage, mesh=lowered.plan.mesh, verified=True,
                traced=False, left_out=left_out,
            )  # fmt: skip
        except UnsteadyError:
            continue
        return prediction_of(lowered, cluster, simulation), simulation
    raise AssertionError("a whole step is steady")
