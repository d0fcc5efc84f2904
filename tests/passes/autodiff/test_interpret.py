"""The interpreter: several outputs, constants, keyword arguments, gradients switched off."""

from __future__ import annotations

import torch

from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorSpec
from merakc.passes.autodiff.interpret import interpret

SPEC = TensorSpec((4,), torch.float64)
ROW = TensorSpec((2,), torch.float64)
X = Input("x", InputKind.BATCH, SPEC)


def result(ref: Ref) -> Output:
    return Output(str(ref), OutputKind.RESULT, ref)


def test_outputs_of_one_node_are_told_apart() -> None:
    split = Node("s", "aten.split.Tensor", (Ref("x"), 2), (), (ROW, ROW))
    graph = Graph((X,), (split,), (result(Ref("s", 1)), result(Ref("s"))))
    second, first = interpret(graph, {"x": torch.arange(4.0)})
    assert first.tolist() == [0.0, 1.0]
    assert second.tolist() == [2.0, 3.0]


def test_keyword_arguments_and_nested_values_are_filled_in() -> None:
    cat = Node("c", "aten.cat.default", ((Ref("x"), Ref("x")),), (("dim", 0),), (SPEC,))
    graph = Graph((X,), (cat,), (result(Ref("c")),))
    assert interpret(graph, {"x": torch.ones(4)})[0].shape == (8,)


def test_constants_are_the_graphs_unless_given() -> None:
    constant = Input("k", InputKind.CONSTANT, SPEC)
    add = Node("a", "aten.add.Tensor", (Ref("x"), Ref("k")), (), (SPEC,))
    graph = Graph((X, constant), (add,), (result(Ref("a")),), {"k": torch.ones(4)})
    assert interpret(graph, {"x": torch.zeros(4)})[0].tolist() == [1.0] * 4
    given = {"x": torch.zeros(4), "k": torch.full((4,), 2.0)}
    assert interpret(graph, given)[0].tolist() == [2.0] * 4


def test_a_node_recorded_without_gradients_gives_none() -> None:
    half = Node("h", "aten.mul.Tensor", (Ref("x"), 0.5), (), (SPEC,), grad=False)
    total = Node("t", "aten.add.Tensor", (Ref("x"), Ref("h")), (), (SPEC,))
    x = torch.ones(4, requires_grad=True)
    (out,) = interpret(Graph((X,), (half, total), (result(Ref("t")),)), {"x": x})
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1.0] * 4


def test_a_python_function_of_the_graph_is_called() -> None:
    call = Node("f", "function.double", (Ref("x"),), (), (SPEC,))
    graph = Graph((X,), (call,), (result(Ref("f")),), {}, {"function.double": lambda x: x * 2})
    assert interpret(graph, {"x": torch.ones(4)})[0].tolist() == [2.0] * 4
