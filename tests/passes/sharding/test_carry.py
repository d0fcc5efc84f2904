"""Graphs that are divided over cp and over tp."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch
from torch import nn

from merakc.errors import PlanError
from merakc.frontend.record import record
from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorSpec
from merakc.ir.layout import DimFactor, Layout, whole_layout
from merakc.kernels.collectives import AXES
from merakc.passes.sharding.carry import carried
from merakc.passes.sharding.layouts import Sharding
from merakc.passes.sharding.shard import shard
from merakc.passes.sharding.spmd import spmd_partition
from tests.passes.sharding.sequences.test_context import _graph

B, S, HEADS, WIDTH = 2, 12, 4, 4  # those of the graph


def test_each_lane_has_its_heads_of_its_rows() -> None:
    graph = _graph()
    sharding = shard(graph, 2, cp=3)
    assert sharding.lanes == 6
    for lane in range(6):
        local = spmd_partition(graph, sharding, lane)
        local.verify()
        (attention,) = [n for n in local.nodes if "attention" in n.op]
        assert attention.spec.shape == (B, HEADS // 2, S // 3, WIDTH)
        assert attention.args[6] == lane // 2 * (S // 3)
        specs = local.specs()
        assert specs[attention.args[1]].shape == (B, HEADS // 2, S, WIDTH)
        assert {arg for n in local.nodes for arg in n.args if arg in AXES} == set(AXES)
        ref = Ref(attention.name)
        assert sharding.local_spec(ref, graph.specs()[ref], lane) == attention.spec


def test_weights_are_parts_over_tp_alone() -> None:
    graph = _graph()
    alone, both = shard(graph, 2), shard(graph, 2, cp=2)
    assert both.splits(graph) == alone.splits(graph) != {}
    inputs = [spmd_partition(graph, both, lane).inputs for lane in range(4)]
    weights = [[i.spec for i in own if i.kind is InputKind.PARAMETER] for own in inputs]
    assert weights[0] == weights[2]
    assert weights[1] == weights[3]


def test_one_dim_is_not_split_over_both() -> None:
    graph = _graph()
    sharding = shard(graph, 2, cp=2)
    (ids, _) = [i for i in graph.inputs if i.kind is InputKind.BATCH]
    lay = Layout(((DimFactor(B),), (DimFactor(S, True),)))
    split = replace(sharding, layouts={**sharding.layouts, Ref(ids.name): lay})
    short = replace(ids, spec=TensorSpec((B, S // 2), ids.spec.dtype))
    graph, part = (Graph((one,), (), ()) for one in (ids, short))
    with pytest.raises(PlanError, match="split over tp meets what is split over cp, at dim 1"):
        carried(graph, split, part)


def test_what_others_read_comes_out_as_they_take_it() -> None:
    spec, whole = TensorSpec((B, S), torch.float32), whole_layout((B, S))
    x = Input("x", InputKind.ACTIVATION, spec)
    y = Node("y", "aten.relu.default", (Ref("x"),), (), (spec,))
    graph = Graph((x,), (y,), (Output("act:y", OutputKind.ACTIVATION, Ref("y")),))
    split = Layout(((DimFactor(B),), (DimFactor(S, True),)))
    for parts, is_right in ((whole, True), (split, False)):
        sharding = Sharding(2, {Ref("x"): whole, Ref("y"): parts}, frozenset(), ())
        with contextlib.nullcontext() if is_right else pytest.raises(PlanError, match="act:y"):
            carried(graph, sharding, graph)


class Penalised(nn.Module):
    """A value that tp splits, of which ranks of cp add up parts."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.down = nn.Embedding(32, 16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        wide = self.up(self.words(ids)).relu()
        return self.down(wide).square().sum() + wide.abs().sum()


def test_what_is_added_up_over_both_has_two_names() -> None:
    graph = record(Penalised(), (torch.zeros(B, S, dtype=torch.long),), {}).graph
    for lane in range(4):
        local = spmd_partition(graph, shard(graph, 2, cp=2), lane)
        local.verify()
        sums = [n.args[1] for n in local.nodes if n.op == "merakc.all_reduce.default"]
        assert sorted(sums) == ["cp", "cp", "tp", "tp"]
