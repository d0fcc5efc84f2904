"""From a recording to a plan and back."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path

import pytest
import torch

from benchmarks.models import MODELS
from merakc.costs.device import place_on
from merakc.costs.stage import stage_cost
from merakc.errors import PlanError
from merakc.frontend.record import Recording
from merakc.ir.graph import InputKind, OutputKind, Ref
from merakc.ir.plan import Plan
from merakc.ir.plan_file import PlanFile, load_plan
from merakc.ir.program import ActionKind, Mesh
from merakc.ir.strategy import Strategy
from merakc.lowering.lowered import (
    Lowered,
    adapt_plan,
    apply_plan,
    make_plan,
)
from merakc.lowering.predict import predict
from merakc.machines.cluster import NOMINAL_CPU
from merakc.schedules.registry import make_schedule
from merakc.schedules.text import format_schedule
from tests.recorded import one_of_several

LAYOUTS = (Mesh(), Mesh(tp=2), Mesh(pp=2), Mesh(pp=4), Mesh(2, 2, 2), Mesh(tp=3, pp=2))
MICRO_BATCHES = 4


@cache
def recording(name: str = "gpt2", samples: int = 2) -> Recording:
    case = MODELS[name]
    return one_of_several(case.model(), case.batch(samples))


def planned(mesh: Mesh, name: str = "gpt2", **options: str) -> tuple[Plan, Lowered]:
    lowered = make_plan(
        recording(name), Strategy().on(mesh, micro_batches=MICRO_BATCHES, **options), NOMINAL_CPU
    )  # type: ignore[arg-type]
    return lowered.plan, lowered


@pytest.mark.parametrize("mesh", LAYOUTS)
@pytest.mark.parametrize("name", ["gpt2", "t5", "resnet"])
def test_a_saved_plan_gives_the_same_graphs(name: str, mesh: Mesh, tmp_path: Path) -> None:
    plan, lowered = planned(mesh, name)
    PlanFile(plan).save(tmp_path / "plan.json")
    again = apply_plan(load_plan(tmp_path / "plan.json").decisions, recording(name))
    assert again.plan == plan
    assert again.stages.of == lowered.stages.of
    assert again.stages.graphs == lowered.stages.graphs
    assert again.stages.transfers == lowered.stages.transfers
    assert again.stages.local == lowered.stages.local
    assert again.programs() == lowered.programs()


def test_the_same_recording_gives_the_same_plan() -> None:
    fresh = one_of_several(MODELS["t5"].model(), MODELS["t5"].batch(2))
    first, _ = planned(Mesh(1, 2, 2), "t5")
    second = make_plan(
        fresh, Strategy().on(Mesh(1, 2, 2), micro_batches=MICRO_BATCHES), NOMINAL_CPU
    ).plan
    assert first.hash == second.hash


def test_drift_is_refused_with_the_first_module_that_differs() -> None:
    plan, _ = planned(Mesh(pp=2))
    model = MODELS["gpt2"].model()
    model.get_submodule("transformer.h.2.mlp").act = torch.nn.ReLU()
    changed = one_of_several(model, MODELS["gpt2"].batch(2))
    with pytest.raises(PlanError, match=r"module 'transformer\.h\.2.*make the plan again"):
        apply_plan(plan, changed)
    with pytest.raises(PlanError, match="another graph"):
        apply_plan(plan, recording("gpt2", 4))


def test_the_plan_names_its_holders() -> None:
    plan, lowered = planned(Mesh(1, 2, 4))
    assert plan.parameters["transformer.wte.weight"] == (0, 3)
    assert plan.splits["transformer.h.0.mlp.c_fc.weight"] == "32 x 128*"
    assert set(plan.parameters) == {
        i.target for i in lowered.loss.graph.inputs if i.kind is InputKind.PARAMETER
    }


def test_ops_that_every_rank_computes_whole_are_named() -> None:
    class Clipped(torch.nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.renorm(self[1](self[0](x)), 2, 0, 1.0).sum()

    model = Clipped(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
    clipped = one_of_several(model, (torch.randn(4, 4),))
    # One micro-batch: of several, what no rule knows would be in the head.
    plan = make_plan(clipped, Strategy().on(Mesh(tp=2), micro_batches=1), NOMINAL_CPU).plan
    assert [text.partition(" at ")[0] for text in plan.whole_ops] == ["aten.renorm.default"]
    assert planned(Mesh(tp=2))[0].whole_ops == ()


def test_no_rank_holds_more_than_tp_rank_0() -> None:
    _, lowered = planned(Mesh(tp=3, pp=2))
    for stage in range(2):
        first, last = (lowered.stage_graphs(stage, rank).forward for rank in (0, 2))
        for a, b in zip(first.inputs, last.inputs, strict=True):
            assert a.spec.numel >= b.spec.numel


@pytest.mark.parametrize("recompute", ["none", "stage"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_the_predicted_peak_is_that_of_a_replay(schedule: str, recompute: str) -> None:
    _, lowered = planned(Mesh(), schedule=schedule, recompute=recompute)
    cost = stage_cost(lowered.stage_graphs(0, 0), place_on(NOMINAL_CPU, 1))
    prediction, simulation = predict(lowered, NOMINAL_CPU, (cost,))
    full = recompute == "stage"
    kept = cost.checkpoint_bytes if full else cost.saved_bytes
    effects = {  # the highest point over what was alive, and what is alive after more than before
        ActionKind.FORWARD: (
            cost.checkpoint_peak_bytes if full else cost.forward_peak_bytes, kept
        ),
        ActionKind.RECOMPUTE: (cost.recompute_peak_bytes, cost.saved_bytes - kept),
        ActionKind.BACKWARD: (cost.backward_peak_bytes, -cost.saved_bytes),
        ActionKind.INPUT_GRAD: (cost.backward_peak_bytes, cost.deferred_bytes - cost.saved_bytes),
        ActionKind.WEIGHT_GRAD: (cost.weight_peak_bytes, -cost.deferred_bytes),
        ActionKind.REDUCE: (0, 0),
    }  # fmt: skip
    alive = peak = cost.static_bytes
    for action in lowered.programs()[0].actions:
        most, more = effects[action.kind]
        peak = max(peak, alive + most)
        alive += more
    assert alive == cost.static_bytes
    assert prediction.peak_bytes == simulation.peak_bytes == (peak,)
    each_s = cost.forward_s + (cost.recompute_s if full else 0.0)
    each_s += cost.input_grad_s + cost.weight_grad_s if schedule == "zb-h1" else cost.backward_s
    assert prediction.step_s == pytest.approx(MICRO_BATCHES * each_s)


def test_a_schedule_says_how_many_stages_there_are() -> None:
    plan, lowered = planned(Mesh(tp=2, pp=2), schedule="zb-v")
    assert plan.placement == plan.rank_of == (0, 1, 1, 0)
    assert {run.stage for run in plan.stages} == {0, 1, 2, 3}
    assert set(lowered.rank_graphs(0)) == {0, 3}
    assert set(lowered.rank_graphs(3)) == {1, 2}
    chunk = lowered.rank_graphs(0)[3]
    assert chunk.input_grad is not None
    assert chunk.checkpoint is None
    more = make_plan(
        recording(),
        Strategy().on(
            Mesh(pp=2), micro_batches=MICRO_BATCHES, schedule="interleaved-1f1b", chunks=3
        ),
        NOMINAL_CPU,
    ).plan
    assert more.placement == (0, 1, 0, 1, 0, 1)
    assert planned(Mesh(pp=2))[0].placement == ()


def test_an_order_of_the_users_own(tmp_path: Path) -> None:
    text = format_schedule(make_schedule("gpipe", 2, MICRO_BATCHES))
    lowered = make_plan(
        recording(),
        Strategy().on(
            Mesh(pp=2), micro_batches=MICRO_BATCHES, schedule="mine", order=tuple(text.splitlines())
        ),
        NOMINAL_CPU,
    )
    plan = lowered.plan
    assert lowered.programs() == planned(Mesh(pp=2), schedule="gpipe")[1].programs()
    PlanFile(plan).save(tmp_path / "plan.json")
    again = apply_plan(load_plan(tmp_path / "plan.json").decisions, recording())
    assert again.programs() == lowered.programs()


def test_each_stage_keeps_what_the_plan_lets_it() -> None:
    plan, lowered = planned(Mesh(pp=2))
    solved = dataclasses.replace(plan, recompute="solved", keep_bytes=(40_000, -1))
    lowered = dataclasses.replace(lowered, plan=solved)
    first, last = lowered.stage_graphs(0, 0), lowered.stage_graphs(1, 0)
    assert last.recompute is None
    cost = stage_cost(first, place_on(NOMINAL_CPU, 1))
    assert 20_000 < cost.checkpoint_bytes <= 40_000 < cost.saved_bytes
    kinds = [{a.kind for a in p.actions} for p in lowered.programs()]
    assert [ActionKind.RECOMPUTE in k for k in kinds] == [True, False]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_stages_that_are_compiled_keep_less(schedule: str) -> None:
    _, lowered = planned(Mesh(pp=2), schedule=schedule)
    lean = dataclasses.replace(lowered, compiled=True)
    for stage in range(2):
        place = place_on(NOMINAL_CPU, 1)
        plain, other = (stage_cost(x.stage_graphs(stage, 0), place) for x in (lowered, lean))
        assert other.saved_bytes < 0.9 * plain.saved_bytes
        halves = lean.stage_graphs(stage, 0)
        assert (halves.input_grad is not None) is (schedule == "zb-h1")


@pytest.mark.parametrize("name", ["gpt2", "t5", "resnet"])
def test_a_plan_adapts_to_evaluation_and_to_other_shapes(name: str) -> None:
    _, lowered = planned(Mesh(1, 2, 4), name)
    model = MODELS[name].model().eval()
    other = one_of_several(model, MODELS[name].batch(3))
    adapted = adapt_plan(lowered, other, results=True)
    names = {o.name for g in adapted.stages.graphs for o in g.outputs
             if o.kind in (OutputKind.LOSS, OutputKind.RESULT)}  # fmt: skip
    assert names == {o.name for o in other.graph.outputs if o.kind is not OutputKind.BUFFER}
    before, now = lowered.stages.sharding, adapted.stages.sharding
    layouts = {i.target: now.layouts[Ref(i.name)] for i in adapted.loss.graph.inputs}
    for item in lowered.loss.graph.inputs:
        if item.kind is InputKind.PARAMETER:
            assert layouts[item.target] == before.layouts[Ref(item.name)], item.target
    chunk = adapted.stage_graphs(0, 1, train=False)
    assert chunk.backward is None
