"""The decision as a value: specs of a rank, names of what is split, ops kept whole."""

from __future__ import annotations

import torch

from merakc.ir.graph import InputKind, Ref, TensorSpec
from merakc.passes.propagate import propagate
from merakc.passes.shard import shard, sharding_of
from merakc.planner import training_graph
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


def test_ops_on_masks_alone_are_not_reported() -> None:
    graph = training_graph(eager("whisper").recording.graph)
    sharding = shard(graph, 2)
    assert {n.op for n in sharding.opaque} >= {"aten.select_scatter.default"}
    assert not [text for text in sharding.whole_ops(graph) if "select_scatter" in text]
    mixed = training_graph(eager("mixtral").recording.graph)
    assert [text for text in shard(mixed, 2).whole_ops(mixed) if text.startswith("aten.topk")]
