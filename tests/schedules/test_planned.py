from __future__ import annotations

import dataclasses

import pytest

from merakc.errors import ConfigError, ProgramError
from merakc.ir.plan import GraphId, Plan
from merakc.ir.program import ActionKind, Mesh
from merakc.passes.programs.schedule import build_programs
from merakc.schedules.check import check_schedule
from merakc.schedules.planned import forwards_first, planned_schedule, with_fewer
from merakc.schedules.registry import KNOWN, make_schedule
from merakc.schedules.text import format_schedule
from merakc.simulation.faults import verify_programs

PLAN = Plan(
    pp=2, batch_size=8, micro_batches=4, schedule="gpipe", model="model", graph=GraphId("", ()),
    stages=(), parameters={}, splits={},
)  # fmt: skip


def ordered(text: str) -> Plan:
    return dataclasses.replace(PLAN, schedule="mine", order=tuple(text.splitlines()))


def test_an_order_of_the_users_own() -> None:
    text = format_schedule(make_schedule("1f1b", 2, 4))
    assert format_schedule(planned_schedule(ordered(text))) == text
    wrong = dataclasses.replace(ordered(text), micro_batches=2)
    with pytest.raises(ConfigError, match="'mine' is an order of 4 micro-batches on 2 ranks"):
        planned_schedule(wrong)
    again = format_schedule(make_schedule("gpipe", 2, 4, recompute="full"))
    with pytest.raises(ConfigError, match="recomputes, and recompute is 'none'"):
        planned_schedule(ordered(again))


def test_all_forwards_come_first_where_the_loss_waits_for_the_batch() -> None:
    text = "0F0 0F1 0I0 0F2 0W0 0I1 0F3 0W1 0B2 0B3\n1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"
    found = planned_schedule(ordered(text), whole_batch=True)
    assert format_schedule(found) == (
        "0F0 0F1 0F2 0F3 0I0 0W0 0I1 0W1 0B2 0B3\n1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3"
    )


@pytest.mark.parametrize("name", KNOWN)
def test_fewer_micro_batches_run_in_the_order_of_more(name: str) -> None:
    schedule = make_schedule(name, 4, 8)
    many = dataclasses.replace(
        PLAN, pp=4, micro_batches=8, schedule=name, recompute="stage", placement=schedule.rank_of,
        order=tuple(format_schedule(schedule).splitlines()),
    )  # fmt: skip
    assert with_fewer(many, 8) is many
    fewer = with_fewer(many, 3)
    found = planned_schedule(fewer)
    assert fewer.micro_batches == 3
    assert {a.micro_batch for order in found.orders for a in order} == {0, 1, 2}
    programs = build_programs(Mesh(pp=4), found, ())
    verify_programs(programs, micro_batches=3, training=True)


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("micro_batches", [1, 3, 8])
def test_every_known_schedule_runs_to_its_end_with_forwards_first(
    name: str, micro_batches: int
) -> None:
    schedule = make_schedule(name, 4, micro_batches)
    found = forwards_first(schedule)
    check_schedule(found)
    assert [sorted(map(str, o)) for o in found.orders] == [
        sorted(map(str, o)) for o in schedule.orders
    ]
    last = found.stages - 1
    programs = build_programs(Mesh(pp=4), found, (), head=last)
    verify_programs(programs, micro_batches=micro_batches, training=True, head=last)
    kinds = [a.kind for a in programs[found.rank_of[last]].actions]
    assert kinds.index(ActionKind.HEAD) == 1 + max(
        k for k, kind in enumerate(kinds) if kind is ActionKind.FORWARD
    )
    if found.orders != schedule.orders:
        programs = build_programs(Mesh(pp=4), schedule, (), head=last)
        with pytest.raises(ProgramError, match=f"{last}head: stands after a backward"):
            verify_programs(programs, head=last)
