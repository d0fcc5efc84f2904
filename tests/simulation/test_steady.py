"""Steps of which micro-batches are left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from merakc.ir.costs import CostTable, StageCost
from merakc.ir.program import Action, ActionKind, Collective, CollectiveKind, Mesh, Program
from merakc.passes.programs.schedule import build_programs
from merakc.schedules.registry import make_schedule
from merakc.simulation.simulate import Simulation, simulate
from merakc.simulation.steady import LeftOut, UnsteadyError

F, B = ActionKind.FORWARD, ActionKind.BACKWARD


def costs(*seconds: tuple[float, float], overlap: float = 1.0) -> CostTable:
    stages = tuple(StageCost(f, b, saved_bytes=7) for f, b in seconds)
    collective_s = {("b", CollectiveKind.SCATTER): 2.0, ("b", CollectiveKind.REDUCE): 2.0}
    return CostTable(stages, 0.0, float("inf"), collective_s=collective_s, overlap=overlap)


def step(schedule: str, micro_batches: int, table: CostTable) -> list[Program]:
    ranks = len(table.stages)
    programs = build_programs(Mesh(pp=ranks), make_schedule(schedule, ranks, micro_batches), [])
    return list(programs)


def figures(one: Simulation) -> list[float]:
    return [one.step_s, one.bubble_share, *one.busy_s, *one.exposed_s, *one.communication_s]


def one_rank(micro_batches: int, scattered: bool = True) -> list[Program]:
    """Forwards and backwards in turn, of which all but the last backward scatter a gradient."""
    actions = []
    for m in range(micro_batches):
        kind = CollectiveKind.SCATTER if m + 1 < micro_batches else CollectiveKind.REDUCE
        posted = (Collective(kind, "b", "", 1.0),) if scattered else ()
        actions += [Action(F, 0, m), Action(B, 0, m, collectives=posted)]
    return [Program(0, (*actions, Action(ActionKind.REDUCE, 0)))]


@pytest.mark.parametrize("overlap", [0.2, 0.5, 1.0])
@pytest.mark.parametrize("backward_s", [0.5, 1.0, 4.0])
def test_what_collectives_lag_behind_grows(overlap: float, backward_s: float) -> None:
    """Scatters of two seconds beside computes of less, that nothing waits for before the end."""
    table = costs((0.5, backward_s), overlap=overlap)
    whole = simulate(one_rank(30), table)
    short = simulate(one_rank(12), table, traced=False, left_out=LeftOut(3, 2, 9))
    assert figures(short) == pytest.approx(figures(whole), rel=1e-9)
    assert short.peak_bytes == whole.peak_bytes


def test_ranks_that_run_at_their_own_pace_are_unsteady() -> None:
    """Two ranks without messages: the faster one ends long before the other."""
    table = costs((1.0, 2.0), (1.0, 2.1))
    with pytest.raises(UnsteadyError):
        simulate(step("1f1b", 12, table), table, traced=False, left_out=LeftOut(3, 1, 9))


def test_forwards_that_are_all_before_the_backwards_are_unsteady() -> None:
    """Even where nothing is kept of them."""
    table = replace(costs((1.0, 2.0)), stages=(StageCost(1.0, 2.0),))
    with pytest.raises(UnsteadyError):
        simulate(step("gpipe", 12, table), table, traced=False, left_out=LeftOut(3, 1, 9))


def test_what_is_held_more_with_each_period_is_unsteady() -> None:
    """Two forwards a backward, and weight gradients in the end: as many computes a period as a
    micro-batch has.
    """
    actions = [a for m in range(12) for a in (Action(F, 0, 2 * m), Action(F, 0, 2 * m + 1),
               Action(ActionKind.INPUT_GRAD, 0, m))]  # fmt: skip
    actions += [Action(ActionKind.INPUT_GRAD, 0, m) for m in range(12, 24)]
    actions += [Action(ActionKind.WEIGHT_GRAD, 0, m) for m in range(24)]
    cost = StageCost(1.0, 2.0, input_grad_s=1.0, weight_grad_s=1.0, saved_bytes=7)
    table = CostTable((cost,), 0.0, float("inf"))
    program = Program(0, (*actions, Action(ActionKind.REDUCE, 0)))
    with pytest.raises(UnsteadyError):
        simulate([program], table, traced=False, left_out=LeftOut(3, 1, 9))


def test_a_lag_that_is_made_up_for_is_unsteady() -> None:
    """What was posted first takes many computes to end."""
    (program,) = one_rank(12, scattered=False)
    head = Action(
        ActionKind.GATHER, 0, collectives=(Collective(CollectiveKind.REDUCE, "b", "", 0.0),)
    )
    table = costs((0.1, 0.1))
    table = replace(table, collective_s={("b", CollectiveKind.REDUCE): 50.0})
    with pytest.raises(UnsteadyError):
        simulate(
            [Program(0, (head, *program.actions))], table, verified=True, traced=False,
            left_out=LeftOut(3, 1, 9),
        )  # fmt: skip
