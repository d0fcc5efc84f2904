"""The rules that are no einsum: which factors they hand on. Values are tried in test_rules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from merakc.ir.graph import Ref
from merakc.passes.sharding.dims import Dims
from merakc.passes.sharding.factors import leaves
from merakc.passes.sharding.propagate import propagate
from tests.passes.rule_cases import randn
from tests.passes.sharding.test_rules import build


def dims_of(op: str, *call: Any) -> Dims:
    return propagate(build(op, call)[0])


def out(dims: Dims, index: int = 0) -> list[list[int]]:
    return [[f.size for f in leaves(d)] for d in dims.of[Ref("y", index)]]


def free(dims: Dims, name: str) -> list[bool]:
    """For each dim of a value, whether all of it may be split."""
    return [not any(f.blocked for f in leaves(dim)) for dim in dims.of[Ref(name)]]


def test_equal_parts_of_a_split_are_one_factor() -> None:
    dims = dims_of("aten.split.Tensor", randn(4, 12), 4, 1)
    assert [f.size for f in leaves(dims.of[Ref("x0")][1])] == [3, 4]
    assert dims.of[Ref("y", 0)][1] == dims.of[Ref("y", 2)][1]
    assert free(dims, "y") == [True, True]


def test_an_index_leaves_the_other_dims_alone() -> None:
    picked: Tensor = torch.zeros(2, 3, dtype=torch.long)
    dims = dims_of("aten.index.Tensor", randn(4, 5, 6), (None, picked))
    assert out(dims) == [[4], [2], [3], [6]]
    assert free(dims, "x0") == [True, False, True]
    apart = dims_of("aten.index.Tensor", randn(4, 5, 6), (picked, None, picked))
    assert out(apart) == [[2], [3], [5]]
    assert free(apart, "x0") == [False, True, False]


def test_a_mask_as_an_index_keeps_all_whole() -> None:
    mask = torch.ones(4, dtype=torch.bool)
    dims = dims_of("aten.index_put.default", randn(4, 5), (mask,), randn(5))
    assert free(dims, "x0") == [False, False]


def test_the_parts_of_a_concatenation_are_segments() -> None:
    dims = dims_of("aten.cat.default", (randn(2, 4), randn(2, 6)), 1)
    (joined,) = leaves(dims.of[Ref("y")][1])
    assert [leaves(s) for s in joined.segments] == [
        leaves(dims.of[Ref(name)][1]) for name in ("x0", "x1")
    ]


def test_a_reshape_that_does_not_divide_is_whole() -> None:
    matrix = dims_of("aten.reshape.default", randn(4, 6), (3, 8))
    assert free(matrix, "x0") == [False, False]
    assert free(dims_of("aten.reshape.default", randn(4, 6), (2, 2, 6)), "x0") == [True, True]
