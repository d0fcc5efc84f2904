"""The order of work that a plan describes."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from merakc.errors import ConfigError, PlanError
from merakc.files.printable import count_of
from merakc.ir.plan import Plan
from merakc.ir.program import ActionKind
from merakc.ir.schedule import Schedule
from merakc.schedules.registry import make_schedule
from merakc.schedules.text import format_schedule, parse_schedule


def planned_schedule(plan: Plan, *, whole_batch: bool = False) -> Schedule:
    """The order of work that a plan describes; of a loss that waits for the `whole_batch`, with all
    forwards first.

    Raises `ConfigError` where it cannot be: an order of other micro-batches or ranks, or one that
    recomputes where nothing is to be; `PlanError` where its stages are on other ranks.
    """
    schedule = _ordered(plan) if plan.order else _named(plan)
    if schedule.rank_of != plan.rank_of:
        raise PlanError(
            f"the plan places its stages on ranks {plan.rank_of}, schedule '{plan.schedule}' on "
            f"{schedule.rank_of}; make the plan again"
        )
    return forwards_first(schedule) if whole_batch else schedule


def with_fewer(plan: Plan, micro_batches: int) -> Plan:
    """The plan for a batch in so many micro-batches, of those that it has: the order of work
    without the actions of the others, for which nothing that is left ever waits.
    """
    if micro_batches == plan.micro_batches:
        return plan
    schedule = planned_schedule(plan)
    kept = (tuple(a for a in o if a.micro_batch < micro_batches) for o in schedule.orders)
    order = format_schedule(replace(schedule, orders=tuple(kept))).splitlines()
    return replace(plan, micro_batches=micro_batches, order=tuple(order))


def forwards_first(schedule: Schedule) -> Schedule:
    """The schedule with every rank's forwards before all else, both in their order.

    It runs to its end where the other does: a forward waits for forwards alone, and what follows
    them comes in the order that it came in.
    """
    return replace(
        schedule,
        orders=tuple(
            tuple(sorted(order, key=lambda a: a.kind is not ActionKind.FORWARD))
            for order in schedule.orders
        ),
    )


def _named(plan: Plan) -> Schedule:
    virtual_stages = len(plan.rank_of) // plan.pp
    return make_schedule(
        plan.schedule, plan.pp, plan.micro_batches, recompute=_recomputed(plan),
        virtual_stages=virtual_stages if virtual_stages > 1 else None,
    )  # fmt: skip


def _ordered(plan: Plan) -> Schedule:
    schedule = parse_schedule("\n".join(plan.order), plan.schedule)
    found = {a.micro_batch for order in schedule.orders for a in order}
    if len(found) != plan.micro_batches or schedule.ranks != plan.pp:
        raise ConfigError(
            f"schedule '{plan.schedule}' is an order of {count_of(len(found), 'micro-batch')} on "
            f"{count_of(schedule.ranks, 'rank')}, and the plan has {plan.micro_batches} on "
            f"{plan.pp}; write the order for these, or give micro_batches and pp to fit it"
        )
    again = any(a.kind is ActionKind.RECOMPUTE for order in schedule.orders for a in order)
    if again and plan.recompute not in ("stage", "solved"):
        raise ConfigError(
            f"schedule '{plan.schedule}' recomputes, and recompute is '{plan.recompute}'; give "
            "recompute='stage', or an order without R"
        )
    return schedule


def _recomputed(plan: Plan) -> Literal["none", "full"] | tuple[int, ...]:
    """The stages that recompute, in the form of `make_schedule`."""
    if plan.recompute == "solved":
        return tuple(s for s, size in enumerate(plan.keep_bytes) if size >= 0)
    return "full" if plan.recompute == "stage" else "none"
