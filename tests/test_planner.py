"""From a recording to a plan and back."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path

import pytest
import torch

from benchmarks.models import MODELS
from merakc.cluster import NOMINAL_CPU, Cluster
from merakc.errors import PlanError
from merakc.frontend.record import Recording, record
from merakc.ir.graph import InputKind, OutputKind, Ref
from merakc.ir.plan import Plan, load_plan
from merakc.ir.program import ActionKind, Mesh
from merakc.planner import (
    Lowered,
    adapt_plan,
    apply_plan,
    make_plan,
    predict,
    rough_stage_cost,
    stage_cost,
)

LAYOUTS = (Mesh(), Mesh(tp=2), Mesh(pp=2), Mesh(pp=4), Mesh(2, 2, 2), Mesh(tp=3, pp=2))
MICRO_BATCHES = 4


@cache
def recording(name: str = "gpt2", samples: int = 2) -> Recording:
    case = MODELS[name]
    return record(case.model(), (), case.batch(samples))


def planned(mesh: Mesh, name: str = "gpt2", **options: str) -> tuple[Plan, Lowered]:
    return make_plan(recording(name), mesh, MICRO_BATCHES, NOMINAL_CPU, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("mesh", LAYOUTS)
@pytest.mark.parametrize("name", ["gpt2", "t5", "resnet"])
def test_a_saved_plan_gives_the_same_graphs(name: str, mesh: Mesh, tmp_path: Path) -> None:
    plan, lowered = planned(mesh, name)
    plan.save(tmp_path / "plan.json")
    again = apply_plan(load_plan(tmp_path / "plan.json"), recording(name))
    assert again.plan == plan
    assert again.stages.of == lowered.stages.of
    assert again.stages.graphs == lowered.stages.graphs
    assert again.stages.transfers == lowered.stages.transfers
    assert again.stages.local == lowered.stages.local
    assert again.programs() == lowered.programs()


def test_the_same_recording_gives_the_same_plan() -> None:
    fresh = record(MODELS["t5"].model(), (), MODELS["t5"].batch(2))
    first, _ = planned(Mesh(1, 2, 2), "t5")
    second, _ = make_plan(fresh, Mesh(1, 2, 2), MICRO_BATCHES, NOMINAL_CPU)
    assert first.hash == second.hash


def test_drift_is_refused_with_the_first_module_that_differs() -> None:
    plan, _ = planned(Mesh(pp=2))
    model = MODELS["gpt2"].model()
    model.get_submodule("transformer.h.2.mlp").act = torch.nn.ReLU()
    changed = record(model, (), MODELS["gpt2"].batch(2))
    with pytest.raises(PlanError, match=r"module 'transformer\.h\.2.*make the plan again"):
        apply_plan(plan, changed)
    with pytest.raises(PlanError, match="another graph"):
        apply_plan(plan, recording("gpt2", 4))


def test_the_plan_counts_its_collectives_and_names_its_holders() -> None:
    plan, lowered = planned(Mesh(1, 2, 4))
    assert plan.collectives["backward all-reduce"] == 9
    assert plan.collectives["vocabulary-parallel"] >= 2
    assert plan.parameters["transformer.wte.weight"] == (0, 3)
    assert plan.splits["transformer.h.0.mlp.c_fc.weight"] == "32 x 128*"
    assert planned(Mesh(pp=2))[0].collectives == {}
    assert set(plan.parameters) == {
        i.target for i in lowered.loss.graph.inputs if i.kind is InputKind.PARAMETER
    }


def test_ops_that_every_rank_computes_whole_are_named() -> None:
    class Clipped(torch.nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.renorm(self[1](self[0](x)), 2, 0, 1.0).sum()

    model = Clipped(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
    clipped = record(model, (torch.randn(4, 4),), {})
    plan, _ = make_plan(clipped, Mesh(tp=2), MICRO_BATCHES, NOMINAL_CPU)
    assert [text.partition(" at ")[0] for text in plan.whole_ops] == ["aten.renorm.default"]
    assert planned(Mesh(tp=2))[0].whole_ops == ()


def test_no_rank_holds_more_than_tp_rank_0() -> None:
    _, lowered = planned(Mesh(tp=3, pp=2))
    for stage in range(2):
        first, last = (lowered.chunk(stage, rank).forward for rank in (0, 2))
        for a, b in zip(first.inputs, last.inputs, strict=True):
            assert a.spec.numel >= b.spec.numel


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_predicted_peak_is_that_of_a_replay(schedule: str, recompute: str) -> None:
    plan, lowered = planned(Mesh(), schedule=schedule, recompute=recompute)
    cost = stage_cost(lowered.chunk(0, 0), NOMINAL_CPU, plan)
    prediction, simulation = predict(lowered, NOMINAL_CPU, (cost,))
    alive = peak = cost.static_bytes
    for action in lowered.programs()[0].actions:
        if action.kind is ActionKind.FORWARD:
            peak = max(peak, alive + cost.forward_peak_bytes)
            alive += cost.saved_bytes
        if action.kind is ActionKind.BACKWARD:
            peak = max(peak, alive + cost.backward_peak_bytes)
            alive -= cost.saved_bytes
    assert prediction.peak_bytes == simulation.peak_bytes == (peak,)
    seconds = MICRO_BATCHES * (cost.forward_s + cost.backward_s)
    assert prediction.step_s == pytest.approx(seconds)


def test_recomputation_trades_seconds_for_bytes() -> None:
    plan, lowered = planned(Mesh(pp=2))
    full = dataclasses.replace(plan, recompute="full")
    for stage in range(2):
        chunk, local = lowered.chunk(stage, 0), lowered.stages.local[stage]
        kept, dropped = (stage_cost(chunk, NOMINAL_CPU, p) for p in (plan, full))
        assert dropped.saved_bytes < kept.saved_bytes
        assert dropped.backward_s == pytest.approx(kept.backward_s + kept.forward_s)
        rough, roughly = (rough_stage_cost(local, NOMINAL_CPU, p) for p in (plan, full))
        assert roughly.saved_bytes == dropped.saved_bytes
        assert rough.static_bytes == kept.static_bytes
        assert rough.saved_bytes >= kept.saved_bytes  # without the backward it is an upper bound


def test_data_parallel_ranks_reduce_their_gradients() -> None:
    slow = Cluster("slow link", 5e10, 1e10, 0.0, 1 << 33, 0.5, 1e6)
    _, one = planned(Mesh())
    _, four = planned(Mesh(dp=4))
    grads_bytes = sum(i.spec.size_bytes for i in one.stages.local[0].inputs if i.requires_grad)
    alone, together = (predict(lowered, slow)[0].step_s for lowered in (one, four))
    assert together - alone == pytest.approx(0.5 + 1.5 * grads_bytes / 1e6)


@pytest.mark.parametrize("name", ["gpt2", "t5", "resnet"])
def test_a_plan_adapts_to_evaluation_and_to_other_shapes(name: str) -> None:
    _, lowered = planned(Mesh(1, 2, 4), name)
    model = MODELS[name].model().eval()
    other = record(model, (), MODELS[name].batch(3))
    adapted = adapt_plan(lowered, other, results=True)
    names = {o.name for g in adapted.stages.graphs for o in g.outputs
             if o.kind in (OutputKind.LOSS, OutputKind.RESULT)}  # fmt: skip
    assert names == {o.name for o in other.graph.outputs if o.kind is not OutputKind.BUFFER}
    before, now = lowered.stages.sharding, adapted.stages.sharding
    layouts = {i.target: now.layouts[Ref(i.name)] for i in adapted.loss.graph.inputs}
    for item in lowered.loss.graph.inputs:
        if item.kind is InputKind.PARAMETER:
            assert layouts[item.target] == before.layouts[Ref(item.name)], item.target
    chunk = adapted.chunk(0, 1, train=False)
    assert chunk.backward is None
