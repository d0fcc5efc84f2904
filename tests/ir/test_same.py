"""`merakc.ir.same`."""

from __future__ import annotations

import torch

from merakc.ir.graph import Graph, Input, InputKind, Output, OutputKind, Ref, TensorSpec
from merakc.ir.same import Same


def test_of_equal_values_it_gives_the_first() -> None:
    same, one, other = Same(), (1, "a"), (int("1"), "a")
    assert one is not other
    assert same(one) is one
    assert same(other) is one
    assert same((1, "b")) == (1, "b")


def test_of_equal_mappings_it_gives_the_first() -> None:
    same, one = Same(), {"a": "x", "b": "y"}
    assert same.mapping(one) is one
    assert same.mapping(dict(one)) is one
    assert same.mapping({"a": "x"}) is not one


def graph(length: int) -> Graph:
    weight, ids = (TensorSpec(shape, torch.float32) for shape in ((3, 2), (4, length)))
    inputs = (
        Input("w", InputKind.PARAMETER, weight, "w", True),
        Input("x", InputKind.BATCH, ids, "x"),
    )
    return Graph(inputs, (), (Output("x", OutputKind.RESULT, Ref("x")),))


def test_graphs_of_two_shapes_share_all_but_what_differs() -> None:
    same = Same()
    one, other = (graph(length).without_nodes(same) for length in (5, 6))
    assert one.outputs is other.outputs
    assert one.inputs[0] is other.inputs[0]
    assert [g.inputs[1].spec.shape for g in (one, other)] == [(4, 5), (4, 6)]
