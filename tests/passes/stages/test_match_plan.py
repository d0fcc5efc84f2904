"""Plans that contradict the graph they were made from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from benchmarks.mutated_plans import plans, recorded
from merakc.errors import PlanError
from merakc.ir.plan import Plan
from merakc.lowering.lowered import Lowered, apply_plan
from merakc.passes.stages.match_plan import holders


@cache
def base() -> Plan:
    """tp = 2 and pp = 2."""
    return plans()[0].decisions


def apply(plan: Plan) -> Lowered:
    return apply_plan(plan, recorded(plan.micro_batches, plan.precision))


@pytest.mark.parametrize("number", range(6))
def test_plans_match_the_graph_they_were_made_from(number: int) -> None:
    plan = plans()[number].decisions
    assert holders(apply(plan).stages.graphs) == plan.parameters


def _moved(plan: Plan) -> Plan:
    """The last layer before the first."""
    runs = plan.stages
    swapped = tuple(replace(r, stage=1 - r.stage) for r in runs)
    return replace(plan, stages=swapped)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda p: replace(p, stages=(*p.stages, p.stages[-1])), "it has . runs of nodes for"),
        (
            lambda p: replace(p, stages=(replace(p.stages[0], last_module="x"), *p.stages[1:])),
            "last_module='x'",
        ),
        (_moved, "which runs after it"),
        (
            lambda p: replace(p, parameters={**p.parameters, "model.norm.weight": (0,)}),
            r"'model.norm.weight' is on stages \(1,\), planned on \(0,\)",
        ),
        (
            lambda p: replace(p, splits={k: v for k, v in p.splits.items() if "k_proj" not in k}),
            "k_proj.weight' is split .* planned whole",
        ),
        (
            lambda p: replace(p, splits={**p.splits, "absent": "8* x 16"}),
            "'absent' of shape None is planned to be split 8. x 16",
        ),
    ],
)
def test_a_contradiction_is_named(change: Callable[[Plan], Any], text: str) -> None:
    with pytest.raises(PlanError, match=f"{text}.*make the plan again"):
        apply(change(base()))
