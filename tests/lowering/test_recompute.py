"""Costs of stages that make blocks again are those of the graphs that are run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.models import MODELS
from merakc.costs.device import place_on
from merakc.costs.stage import stage_cost
from merakc.ir.strategy import Strategy
from merakc.lowering.lowered import make_plan
from merakc.lowering.predict import planned_costs
from merakc.machines.cluster import NOMINAL_CPU
from tests.recorded import one_of_several

KEPT = ("1 kept, 5 again, 1 products", "4 again, 5 kept")


@pytest.mark.parametrize(("recompute", "kept"), [("full", ()), ("selective", ()), ("budget", KEPT)])
def test_planned_costs_are_those_of_the_stages_graphs(
    recompute: str, kept: tuple[str, ...]
) -> None:
    case = MODELS["gpt2"]
    recording = one_of_several(case.model(), case.batch(2))
    strategy = Strategy(pp=2, micro_batches=4, schedule="zb-h1", recompute=recompute)
    lowered = make_plan(recording, strategy, NOMINAL_CPU)
    lowered = replace(lowered, plan=replace(lowered.plan, kept_blocks=kept))
    cluster = NOMINAL_CPU.with_hardware(2)
    place = place_on(cluster, 1)
    for stage, cost in enumerate(planned_costs(lowered, cluster)):
        assert cost == stage_cost(lowered.stage_graphs(stage, 0), place)
        assert cost.weight_grad_s > 0
