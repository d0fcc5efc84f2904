"""Planned costs of stages are those of the graphs that are run."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import cache

import pytest
import torch
import transformers

from benchmarks.models import MODELS
from merakc.costs.device import place_on
from merakc.costs.stage import stage_cost
from merakc.ir.graph import Graph
from merakc.ir.program import StageGraphs
from merakc.ir.strategy import Strategy
from merakc.lowering import graph_costs
from merakc.lowering.lowered import Lowered, make_plan
from merakc.lowering.predict import planned_costs
from merakc.machines.cluster import NOMINAL_CPU
from merakc.passes.pipeline import PiecesOf
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


def test_many_equal_blocks_are_told_by_few(monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=40,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    ids = torch.zeros(2, 64, dtype=torch.long)
    recording = one_of_several(
        transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}
    )
    lowered = make_plan(recording, Strategy(micro_batches=2), NOMINAL_CPU)
    (local,), cluster = lowered.stages.local, NOMINAL_CPU.with_hardware(1)
    asked: list[int] = []
    plain = PiecesOf.__call__

    def counted(own: PiecesOf, graph: Graph) -> StageGraphs:
        asked.append(len(graph.nodes))
        return plain(own, graph)

    monkeypatch.setattr(PiecesOf, "__call__", counted)
    (told,) = planned_costs(lowered, cluster)
    assert max(asked) < len(local.nodes) / 3
    monkeypatch.setattr(graph_costs, "FEW", (98, 99, 100))  # all of them
    again = make_plan(recording, Strategy(micro_batches=2), NOMINAL_CPU)
    (wanted,) = planned_costs(again, cluster)
    assert max(asked) == len(local.nodes)
    for name, value in asdict(wanted).items():
        assert getattr(told, name) == pytest.approx(value, rel=2e-3), name
