"""Arguments and broadcasting."""

from __future__ import annotations

import torch

from merakc.ir.graph import Graph, Input, InputKind, Node, Ref, TensorSpec
from merakc.passes.sharding.dims import Dims, argument, broadcast
from merakc.passes.sharding.factors import leaves, size


def dims_of(**shapes: tuple[int, ...]) -> Dims:
    inputs = tuple(
        Input(n, InputKind.PARAMETER, TensorSpec(s, torch.float32)) for n, s in shapes.items()
    )
    dims = Dims(Graph(inputs, (), ()), {Ref(n): s for n, s in shapes.items()}, {})
    for name in shapes:
        dims.fresh(Ref(name))
    return dims


def test_arguments_by_position_and_by_name() -> None:
    node = Node("y", "aten.sum.default", (Ref("x"),), (("dim", 2),), (None,))
    assert argument(node, 0, "self") == Ref("x")
    assert argument(node, 1, "dim") == 2
    assert argument(node, 2, "keepdim", False) is False


def test_broadcast_unifies_from_the_right_and_skips_ones() -> None:
    dims = dims_of(a=(3, 1, 5), b=(4, 5), c=(1,))
    out = broadcast(dims, [Ref("a"), Ref("b"), Ref("c")], (3, 4, 5))
    assert [size(d) for d in out] == [3, 4, 5]
    assert leaves(out[2]) == leaves(dims.of[Ref("a")][2]) == leaves(dims.of[Ref("b")][1])
    assert leaves(out[1]) == leaves(dims.of[Ref("b")][0])
    assert leaves(out[0]) == leaves(dims.of[Ref("a")][0])
