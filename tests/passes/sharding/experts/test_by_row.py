"""Calls that compute each row by itself, and others."""

from __future__ import annotations

import pytest
import torch

from merakc.ir.graph import Node, Ref, TensorSpec
from merakc.passes.sharding.experts.by_row import by_row

X, W = Ref("x"), Ref("w")


@pytest.mark.parametrize(
    ("op", "args", "out", "alone"),
    [
        ("aten.layer_norm.default", (X, (4,), W, W), (6, 4), True),
        ("aten.mul.Tensor", (X, W), (6, 4), True),
        ("aten.mean.dim", (X, (-1,), True), (6, 1), True),
        ("aten.softmax.int", (X, -1), (6, 4), True),
        ("aten.softmax.int", (X, 0), (6, 4), False),
        ("aten.cumsum.default", (X, 0), (6, 4), False),
        ("aten.mean.dim", (X, (0,), True), (1, 4), False),
        ("aten.sum.default", (X,), (), False),
        ("aten.mul.Tensor", (W, W), (4,), False),
        ("aten.flip.default", (X, (0,)), (6, 4), False),
    ],
)
def test_by_row(op: str, args: tuple[object, ...], out: tuple[int, ...], alone: bool) -> None:
    specs = {X: TensorSpec((6, 4), torch.float64), W: TensorSpec((4,), torch.float64)}
    node = Node("made", op, args, (), (TensorSpec(out, torch.float64),))
    assert by_row(node, {X}, specs) == alone
