"""Ranks that share cores, in cases that can be reckoned by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from merakc.ir.costs import CostTable, StageCost
from merakc.ir.program import (
    Action,
    ActionKind,
    Collective,
    CollectiveKind,
    Mesh,
    Program,
    Transfer,
)
from merakc.machines.cluster import Sharing
from merakc.passes.programs.schedule import build_programs
from merakc.schedules.registry import make_schedule
from merakc.simulation.contention import stretched
from merakc.simulation.simulate import simulate

ONE_CORE, TWO_CORES = Sharing((1.0,), 8), Sharing((1.0, 0.8), 8)
COST = StageCost(forward_s=1.0, backward_s=2.0, input_grad_s=1.0, weight_grad_s=1.0)
FREE = CostTable((COST,), 0.0, float("inf"))


def forwards(rank: int, count: int, reduce: bool = False) -> Program:
    actions = [Action(ActionKind.FORWARD, 0, j) for j in range(count)]
    return Program(rank, (*actions, *([Action(ActionKind.REDUCE, 0)] * reduce)))


def found(
    programs: list[Program], sharing: Sharing, costs: CostTable = FREE, ranks: int = 0,
    kind: ActionKind = ActionKind.FORWARD,
) -> dict[int, list[float]]:  # fmt: skip
    def alone_s(action: Action) -> float:
        return 1.0 if action.kind is kind else 0.0

    return stretched(programs, costs, alone_s, sharing, ranks)


def test_the_speed_of_devices_that_share() -> None:
    assert [TWO_CORES.speed(k) for k in (1, 1.5, 2, 4)] == pytest.approx([1.0, 0.9, 0.8, 0.4])
    assert ONE_CORE.speed(4) == 0.25
    assert TWO_CORES.most(1) == 1.0
    assert TWO_CORES.most(4) == pytest.approx(1.6)
    assert (TWO_CORES.beside(1), TWO_CORES.beside(2), TWO_CORES.beside(4)) == (1.0, 0.0, 0.0)
    assert Sharing((1.0,) * 3, 2).beside(2) == 0.5


def test_ranks_that_compute_at_once_share_and_one_that_is_left_has_all() -> None:
    programs = [forwards(0, 1), forwards(1, 2)]
    assert found(programs, ONE_CORE) == {0: [2.0], 1: [2.0, 1.0]}
    two = found(programs, TWO_CORES)
    assert two[0] == pytest.approx([1.25])
    assert two[1] == pytest.approx([1.25, 1.0])
    four = found([forwards(k, 1) for k in range(4)], TWO_CORES)
    assert [seconds for own in four.values() for seconds in own] == pytest.approx([2.5] * 4)


def test_a_rank_stands_for_others() -> None:
    assert found([forwards(0, 1)], TWO_CORES, ranks=2)[0] == pytest.approx([1.25])
    assert found([forwards(0, 1)], TWO_CORES, ranks=4)[0] == pytest.approx([2.5])


def test_ranks_of_two_nodes_do_not_meet() -> None:
    assert found([forwards(0, 1), forwards(1, 1)], Sharing((1.0,), 1)) == {0: [1.0], 1: [1.0]}


def test_a_rank_that_waits_leaves_its_core_to_others() -> None:
    transfers = [Transfer("h", 0, 1, 8, True)]
    schedule = make_schedule("1f1b", 2, 2)
    programs = build_programs(Mesh(pp=2), schedule, transfers)
    costs = replace(FREE, stages=(COST, COST))
    alone = simulate(programs, costs)
    crowded = simulate(programs, replace(costs, sharing=ONE_CORE, ranks=2))
    assert alone.step_s == 9.0
    assert crowded.step_s == pytest.approx(12.0)  # all that both do: never idle
    assert simulate(programs, replace(costs, sharing=Sharing((1.0, 1.0), 2), ranks=2)) == alone
    between = simulate(programs, replace(costs, sharing=TWO_CORES, ranks=2)).step_s
    assert 9.0 < between < 12.0


def test_collectives_run_beside_and_are_waited_for() -> None:
    posted = Collective(CollectiveKind.REDUCE, "0:0", "n", 0.5)
    backward = Action(ActionKind.BACKWARD, 0, 0, collectives=(posted,))
    actions = Action(ActionKind.FORWARD, 0), backward, Action(ActionKind.REDUCE, 0)
    programs = [Program(k, actions) for k in range(2)]
    for overlap, step_s in ((1.0, 2.0 + 2.0), (0.0, 2.0 + 3.0)):
        costs = replace(
            FREE, stages=(StageCost(0.0, 1.0),), overlap=overlap, sharing=ONE_CORE, ranks=2,
            collective_s={("0:0", CollectiveKind.REDUCE): 3.0},
        )  # fmt: skip
        seconds = found(programs, ONE_CORE, costs, kind=ActionKind.BACKWARD)
        assert seconds == {k: [0.0, 2.0, 0.0] for k in (0, 1)}
        assert simulate(programs, costs).step_s == pytest.approx(step_s)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "gpipe", "zb-v"])
def test_where_nothing_is_slower_the_step_is_the_same(name: str) -> None:
    schedule = make_schedule(name, 2, 4)
    transfers = [Transfer(f"h{s}", s, s + 1, 1 << 20, True) for s in range(schedule.stages - 1)]
    programs = build_programs(Mesh(pp=2), schedule, transfers)
    costs = CostTable((replace(COST, recompute_s=1.0),) * schedule.stages, 0.01, 1e8)
    plain = simulate(programs, costs)
    shared = simulate(programs, replace(costs, sharing=Sharing((1.0, 1.0), 2), ranks=2))
    assert shared.step_s == pytest.approx(plain.step_s)
    assert shared.busy_s == pytest.approx(plain.busy_s)


def test_what_runs_beside_a_wait_takes_a_core_too() -> None:
    posted = Collective(CollectiveKind.REDUCE, "0:0", "n", 1.0)
    backward = Action(ActionKind.BACKWARD, 0, 0, collectives=(posted,))
    first = Program(0, (backward, Action(ActionKind.REDUCE, 0)))
    costs = replace(FREE, collective_s={("0:0", CollectiveKind.REDUCE): 1.0})
    second = forwards(1, 1)
    assert found([first, second], Sharing((1.0, 1.0), 2), costs)[1] == [1.0]
    assert found([first, second], ONE_CORE, costs)[1] == pytest.approx([2.0])
