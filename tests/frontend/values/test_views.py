"""Which dim of what a view is of a dim was."""

from __future__ import annotations

import pytest
import torch

from merakc.frontend.values.views import dim_before, keeps_elements
from merakc.ir.graph import Node, Ref, TensorSpec


def _node(op: str, out: tuple[int, ...], *args: object) -> Node:
    return Node("x", op, (Ref("y"), *args), (), (TensorSpec(out, torch.int64),))


@pytest.mark.parametrize(
    ("node", "shape", "dims"),
    [
        (_node("aten.permute.default", (4, 2, 3), (2, 0, 1)), (2, 3, 4), [2, 0, 1]),
        (_node("aten.transpose.int", (3, 2), 0, -1), (2, 3), [1, 0]),
        (_node("aten.t.default", (3, 2)), (2, 3), [1, 0]),
        (_node("aten.reshape.default", (6, 1, 4), (-1, 1, 4)), (2, 3, 4), [None, None, 2]),
        (_node("aten.unsqueeze.default", (2, 1, 3), 1), (2, 3), [0, None, 1]),
        (_node("aten.relu.default", (2, 3)), (2, 3), [None, None]),
    ],
)
def test_dims_are_those_before(node: Node, shape: tuple[int, ...], dims: list[int | None]) -> None:
    assert [dim_before(node, shape, k) for k in range(len(dims))] == dims
    assert keeps_elements(node) == ("relu" not in node.op)
