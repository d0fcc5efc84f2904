"""The local forms of ops, as text. Their values are tried in test_rules."""

from __future__ import annotations

from typing import Any

import torch

from merakc.ir.graph import Ref
from merakc.passes.sharding.factors import leaves
from merakc.passes.sharding.propagate import propagate
from merakc.passes.sharding.rules import row_of
from merakc.passes.sharding.shard import sharding_of
from merakc.passes.sharding.spmd import spmd_partition
from merakc.passes.sharding.spmd_ops import SPECIAL
from tests.passes.rule_cases import randn
from tests.passes.sharding.test_rules import build


def local_nodes(split: tuple[str, int], rank: int, op: str, *call: Any) -> list[str]:
    """The nodes of one of two ranks, the outermost factor of one dim of an input being split."""
    graph, _ = build(op, call)
    dims = propagate(graph)
    name, dim = split
    factor = leaves(dims.of[Ref(name)][dim])[0]
    return [str(n) for n in spmd_partition(graph, sharding_of(dims, {factor}, 2), rank).nodes]


def test_an_op_with_a_local_form_has_a_row() -> None:
    assert [op for op in SPECIAL if row_of(op) is None] == []


def test_a_reshape_is_given_the_local_shape() -> None:
    found = local_nodes(("x0", 0), 1, "aten.reshape.default", randn(5, 6), (30,))
    assert found == ["%y: float64[12] = aten.reshape.default(%x0, (12))"]


def test_a_bias_is_added_once_after_the_sum() -> None:
    call = randn(2, 6), randn(3, 6), randn(3)
    assert local_nodes(("x1", 1), 0, "aten.linear.default", *call) == [
        "%y: float64[2,3] = aten.linear.default(%x0, %x1)",
        "%y.all_reduce: float64[2,3] = merakc.all_reduce.default(%y, 'tp', 'sum')",
        "%y.bias: float64[2,3] = aten.add.Tensor(%y.all_reduce, %x2)",
    ]


def test_a_slice_of_a_segmented_dim_skips_what_the_rank_has_before_it() -> None:
    call = randn(2, 10), 1, 4, 10
    graph, _ = build("aten.slice.Tensor", call)
    dims = propagate(graph)
    first, second = leaves(dims.of[Ref("x0")][1])[0].segments
    sharding = sharding_of(dims, {*leaves(first), *leaves(second)}, 2)
    (node,) = spmd_partition(graph, sharding, 1).nodes
    assert str(node) == "%y: float64[2,3] = aten.slice.Tensor(%x0, 1, 2, 5)"


def test_a_shard_draws_its_part_of_the_whole() -> None:
    keys = torch.tensor(0), torch.tensor(0)
    call = randn(4, 6, 8), *keys, 0.5, 1, 1, (4, 6, 8), (0, 0, 0), (4, 6, 8)
    found = local_nodes(("x0", 2), 1, "merakc.dropout.default", *call)
    sizes = "1, 1, (4, 6, 8), (0, 0, 4), (4, 6, 4)"
    assert found == [f"%y: float64[4,6,4] = merakc.dropout.default(%x0, %x1, %x2, 0.5, {sizes})"]
