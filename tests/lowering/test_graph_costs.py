"""Planned costs of stages are those of the graphs that are run."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from benchmarks.models import MODELS
from merakc.costs.device import place_on
from merakc.costs.stage import stage_cost
from merakc.ir.strategy import Strategy
from merakc.lowering.lowered import Lowered, make_plan
from merakc.lowering.predict import planned_costs
from merakc.machines.cluster import NOMINAL_CPU
from tests.recorded import one_of_several

CHECKPOINT = ("recompute_s", "checkpoint_bytes", "checkpoint_peak_bytes", "recompute_peak_bytes")
KEPT = ("1 kept, 5 again, 1 products", "4 again, 5 kept")


@cache
def planned(schedule: str, recompute: str, kept: tuple[str, ...] = ()) -> Lowered:
    case = MODELS["gpt2"]
    recording = one_of_several(case.model(), case.batch(2))
    strategy = Strategy(pp=2, micro_batches=4, schedule=schedule, recompute=recompute)
    lowered = make_plan(recording, strategy, NOMINAL_CPU)
    return replace(lowered, plan=replace(lowered.plan, kept_blocks=kept))


@pytest.mark.parametrize(
    ("recompute", "kept"), [("none", ()), ("full", ()), ("selective", ()), ("budget", KEPT)]
)
def test_planned_costs_are_those_of_the_stages_graphs(
    recompute: str, kept: tuple[str, ...]
) -> None:
    lowered = planned("zb-h1", recompute, kept)
    cluster = NOMINAL_CPU.with_hardware(2)
    place = place_on(cluster, 1)
    for stage, cost in enumerate(planned_costs(lowered, cluster)):
        wanted = stage_cost(lowered.stage_graphs(stage, 0), place)
        assert wanted.weight_grad_s > 0
        # How the stage would be recomputed as a whole is known beside.
        beside = {name: getattr(cost, name) for name in CHECKPOINT} if recompute == "none" else {}
        assert cost == replace(wanted, **beside)


@pytest.mark.parametrize("share", [0.0, 0.4])
def test_what_is_recomputed_as_a_whole_is_priced_by_its_graphs(share: float) -> None:
    lowered, cluster = planned("1f1b", "stage"), NOMINAL_CPU.with_hardware(2)
    if share:
        saved = [cost.saved_bytes for cost in planned_costs(lowered, cluster)]
        keep_bytes = tuple(int(share * size) for size in saved)
        solved = replace(lowered.plan, recompute="solved", keep_bytes=keep_bytes)
        lowered = replace(lowered, plan=solved)
    less = planned_costs(planned("1f1b", "stage"), cluster)
    for stage, cost in enumerate(planned_costs(lowered, cluster)):
        wanted = stage_cost(lowered.stage_graphs(stage, 0), place_on(cluster, 1))
        for name in (*CHECKPOINT, "forward_s", "backward_s", "saved_bytes"):
            assert getattr(cost, name) == getattr(wanted, name), name
        if share:
            assert 0 < cost.recompute_s < less[stage].recompute_s
            assert cost.checkpoint_bytes > less[stage].checkpoint_bytes


def test_a_stage_that_receives_nothing_has_no_input_gradient() -> None:
    first, last = planned_costs(planned("1f1b", "none"), NOMINAL_CPU.with_hardware(2))
    assert first.input_grad_s == 0 < last.input_grad_s
    assert first.weight_grad_s == pytest.approx(first.backward_s)
