"""The rules of products, norms and losses: which factors they hand on. Values: test_rules."""

from __future__ import annotations

import torch

from merakc.ir.graph import Ref
from merakc.passes.sharding.dims import Dims
from merakc.passes.sharding.factors import leaves
from tests.passes.rule_cases import randn
from tests.passes.sharding.test_view_rules import dims_of, free, out


def test_grouped_heads_are_a_factor_of_the_query_heads() -> None:
    q, k = randn(2, 6, 5, 4), randn(2, 3, 7, 4)
    dims = dims_of("merakc.attention.default", q, k, k.clone(), None, False, 1.0)
    heads = leaves(dims.of[Ref("x0")][1])
    assert [f.size for f in heads] == [3, 2]
    assert heads[0] is leaves(dims.of[Ref("x1")][1])[0]
    assert free(dims, "x0") == [True, True, True, False]


def test_a_mask_that_broadcasts_ties_no_heads() -> None:
    q = randn(2, 6, 5, 4)
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    dims = dims_of("merakc.attention.default", q, q.clone(), q.clone(), mask, False, 1.0)
    assert free(dims, "x0") == [True, True, True, False]
    assert out(dims) == [[2], [6], [5], [4]]


def test_class_weights_keep_the_classes_whole() -> None:
    target = torch.zeros(5, dtype=torch.long)
    plain = dims_of("aten.cross_entropy_loss.default", randn(5, 7), target)
    assert free(plain, "x0") == [False, True]
    weighed = dims_of("aten.cross_entropy_loss.default", randn(5, 7), target, randn(7))
    assert free(weighed, "x0") == [False, False]
    added = dims_of("aten.cross_entropy_loss.default", randn(5, 7), target, randn(7), 2)
    assert free(added, "x0") == [True, False]
    assert len(added.summed["y"]) == 1


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


def test_a_vector_in_a_product_has_no_rows_or_columns() -> None:
    dims = dims_of("aten.matmul.default", randn(2, 5, 6), randn(6))
    assert out(dims) == [[2], [5]]
    assert dims.summed["y"] == [dims.of[Ref("x0")][2]]


def test_channels_come_before_the_window_in_columns() -> None:
    call = randn(2, 6, 5, 4), (2, 3), (1, 1), (0, 0), (1, 1)
    dims = dims_of("aten.im2col.default", *call)
    assert out(dims) == [[2], [6, 6], [8]]
    assert free(dims, "x0") == [True, True, False, False]
    shuffled = dims_of("aten.channel_shuffle.default", randn(2, 12, 3, 3), 3)
    assert out(shuffled)[1] == [4, 3]
