"""The decision as a value: specs of a rank, names of what is split, ops kept whole."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from merakc.frontend.record import record
from merakc.ir.graph import InputKind, Ref, TensorSpec
from merakc.lowering.lowered import training_graph
from merakc.passes.sharding.propagate import propagate
from merakc.passes.sharding.shard import shard, sharding_of
from tests.passes.whole_models import eager


def test_one_rank_splits_nothing() -> None:
    graph = training_graph(eager("gpt2").recording.graph)
    sharding = shard(graph, 1)
    assert sharding.splits(graph) == {}
    assert not sharding.partial
    assert all(sharding.local_spec(r, s, 0) == s for r, s in graph.specs().items())


def test_uneven_parts_of_the_vocabulary() -> None:
    graph = training_graph(eager("gpt2").recording.graph)
    sharding = shard(graph, 3)
    table = next(Ref(i.name) for i in graph.inputs if i.target == "transformer.wte.weight")
    full = TensorSpec((131, 32), torch.float64)
    rows = [sharding.local_spec(table, full, rank).shape for rank in range(3)]
    assert rows == [(44, 32), (44, 32), (43, 32)]


def test_splits_name_parameters_and_buffers_alone() -> None:
    graph = training_graph(eager("resnet").recording.graph)
    kinds = {i.target: i.kind for i in graph.inputs}
    found = {kinds[name] for name in shard(graph, 2).splits(graph)}
    assert found == {InputKind.PARAMETER, InputKind.BUFFER}


def test_partial_sums_follow_from_the_chosen_factors() -> None:
    graph = training_graph(eager("gpt2").recording.graph)
    assert sharding_of(propagate(graph), set(), 2).partial == frozenset()
    summed = shard(graph, 2).partial
    ops = [n.op for n in graph.nodes if n.name in summed]
    assert ops.count("aten.addmm.default") == 8
    assert ops.count("aten.cross_entropy_loss.default") == 1


class Clipped(nn.Module):
    """An op without a rule on a value that is trained, and on one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.clip, self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        kept = torch.renorm(x, 2, 0, 1.0)
        return {"loss": (torch.renorm(self.clip(kept), 2, 0, 1.0) + self.down(self.up(x))).sum()}


def test_ops_without_a_rule_are_reported_where_they_are_trained_through() -> None:
    graph = training_graph(record(Clipped(), (), {"x": torch.randn(4, 6)}).graph)
    sharding = shard(graph, 2)
    assert [n.op for n in sharding.opaque] == ["aten.renorm.default"] * 2
    (text,) = sharding.whole_ops(graph)
    assert text.startswith("aten.renorm.default at ")


def test_what_is_kept_whole_on_purpose_is_not_reported() -> None:
    graph = training_graph(eager("mixtral").recording.graph)
    assert "aten.topk.default" in {n.op for n in graph.nodes}
    assert shard(graph, 2).whole_ops(graph) == ()
