"""The stages of a plan for other recordings: in eval mode, of other sizes, of several calls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from merakc.errors import PlanError
from merakc.frontend.record import record
from merakc.lowering.lowered import training_graph, with_outputs
from merakc.passes.sharding.shard import shard
from merakc.passes.stages.stage import shared_nodes, split_stages
from merakc.passes.stages.transfer import transfer_stages
from tests.passes.stages.test_stage import Small, holders, small, stages_of, training
from tests.passes.whole_models import eager


@pytest.mark.parametrize("name", ["gpt2", "t5", "resnet"])
@pytest.mark.parametrize("mode", ["eval", "longer"])
def test_another_recording_finds_its_parameters(name: str, mode: str) -> None:
    case = eager(name)
    planned = training(name)
    stages = stages_of(planned, 4)
    held = holders(stages)
    batch = dict(case.batch)
    if mode == "longer":
        batch = {k: torch.cat([v, v]) for k, v in batch.items()}
    case.model.train(mode != "eval")
    try:
        other = record(case.model, (), batch).graph
    finally:
        case.model.train()
    graph = with_outputs(other, other.outputs) if mode == "eval" else training_graph(other)
    of = transfer_stages(graph, planned, stages.of, held)
    split = split_stages(graph, of, 4, shard(graph, 1))
    assert all(t.source_stage < t.target_stage for t in split.transfers)
    for parameter, own in holders(split).items():
        assert set(own) <= set(held[parameter]), parameter


def test_a_recording_that_goes_back_is_refused() -> None:
    graph = small(Small())
    names = {n.name: n for n in graph.nodes}
    of = {n: 0 for n in names if n not in shared_nodes(graph)}
    with pytest.raises(PlanError, match="plan with this batch"):
        transfer_stages(graph, graph, of, {
            "first.weight": (1,), "first.bias": (1,), "last.weight": (0,), "last.bias": (0,),
        })  # fmt: skip


class Summed(nn.Module):
    """So many calls of layers between which the model itself makes sums, and a loss of them."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers, self.count = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), count

    def forward(self, x: Tensor) -> Tensor:
        made = []
        for k in range(self.count):
            y = x * (k + 1)
            for layer in self.layers:
                y = y + torch.tanh(layer(y))
            made.append(y)
        return sum(y.tanh().mean() + (y + 1).mean() for y in made)


def test_a_second_call_goes_through_the_stages_as_the_first() -> None:
    one, two = (training_graph(record(Summed(n), (torch.randn(4, 8),), {}).graph) for n in (1, 2))
    stages = stages_of(one, 2)
    held = holders(stages)
    of = transfer_stages(two, one, stages.of, held)
    assert holders(split_stages(two, of, 2, shard(two, 1))) == held
