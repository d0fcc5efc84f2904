"""The rules that are no einsum: which factors they hand on. Values are tried in test_rules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from merakc.ir.graph import Ref
from merakc.passes.dims import Dims
from merakc.passes.factors import leaves
from merakc.passes.propagate import propagate
from tests.passes.rule_cases import randn
from tests.passes.test_rules import build


def dims_of(op: str, *call: Any) -> Dims:
    return propagate(build(op, call)[0])


def out(dims: Dims, index: int = 0) -> list[list[int]]:
    return [[f.size for f in leaves(d)] for d in dims.of[Ref("y", index)]]


def free(dims: Dims, name: str) -> list[bool]:
    """For each dim of a value, whether all of it may be split."""
    return [not any(f.blocked for f in leaves(dim)) for dim in dims.of[Ref(name)]]


def test_grouped_heads_are_a_factor_of_the_query_heads() -> None:
    q, k = randn(2, 6, 5, 4), randn(2, 3, 7, 4)
    dims = dims_of("merakc.attention.default", q, k, k.clone(), None, False, 1.0)
    heads = leaves(dims.of[Ref("x0")][1])
    assert [f.size for f in heads] == [3, 2]
    assert heads[0] is leaves(dims.of[Ref("x1")][1])[0]
    assert free(dims, "x0") == [True, True, False, False]


def test_a_mask_that_broadcasts_ties_no_heads() -> None:
    q = randn(2, 6, 5, 4)
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    dims = dims_of("merakc.attention.default", q, q.clone(), q.clone(), mask, False, 1.0)
    assert free(dims, "x0") == [True, True, False, False]
    assert out(dims) == [[2], [6], [5], [4]]


def test_equal_parts_of_a_split_are_one_factor() -> None:
    dims = dims_of("aten.split.Tensor", randn(4, 12), 4, 1)
    assert [f.size for f in leaves(dims.of[Ref("x0")][1])] == [3, 4]
    assert dims.of[Ref("y", 0)][1] == dims.of[Ref("y", 2)][1]
    assert free(dims, "y") == [True, True]


def test_class_weights_keep_the_classes_whole() -> None:
    target = torch.zeros(5, dtype=torch.long)
    plain = dims_of("aten.cross_entropy_loss.default", randn(5, 7), target)
    assert free(plain, "x0") == [False, True]
    weighed = dims_of("aten.cross_entropy_loss.default", randn(5, 7), target, randn(7))
    assert free(weighed, "x0") == [False, False]


def test_groups_of_a_convolution_are_a_factor_of_its_channels() -> None:
    def conv(groups: int, inner: int, transposed: bool = False) -> Dims:
        x, w = randn(2, 6, 8), randn(6, inner, 3)
        rest = (None, (1,), (1,), (1,), transposed, (0,), groups)
        return dims_of("aten.convolution.default", x, w, *rest)

    assert free(conv(1, 6), "x1") == [True, True, False]
    grouped = conv(3, 2)
    assert free(grouped, "x1") == [True, True, False]
    assert out(grouped)[1] == [3, 2]
    assert leaves(grouped.of[Ref("x0")][1])[0] is leaves(grouped.of[Ref("y")][1])[0]
    depthwise = conv(6, 1)
    assert leaves(depthwise.of[Ref("x0")][1]) == leaves(depthwise.of[Ref("y")][1])
    assert depthwise.summed["y"] == [[]]  # nothing
    assert out(conv(3, 5, transposed=True))[1] == [3, 5]


def test_groups_of_a_norm_are_free_and_the_channels_of_one_are_not() -> None:
    dims = dims_of("aten.group_norm.default", randn(2, 6, 5), 3, randn(6), randn(6))
    channels = leaves(dims.of[Ref("x1")][0])
    assert [(f.size, not f.blocked) for f in channels] == [(3, True), (2, False)]
    assert out(dims)[1] == [3, 2]


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
