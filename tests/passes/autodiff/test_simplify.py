"""Simplification: golden text of what goes, and values unchanged on whole models."""

from __future__ import annotations

import pytest
import torch

from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorSpec
from merakc.lowering.lowered import training_graph
from merakc.passes.autodiff.interpret import interpret
from merakc.passes.autodiff.simplify import FORWARDED, simplify
from merakc.passes.pipeline import differentiate
from tests.passes.whole_models import eager

F32 = torch.float32


def node(name: str, op: str, args: tuple[object, ...], shape: tuple[int, ...]) -> Node:
    return Node(name, op, args, (), (TensorSpec(shape, F32),))


def graph(*nodes: Node, shape: tuple[int, ...] = (2, 6)) -> Graph:
    x = Input("x", InputKind.BATCH, TensorSpec(shape, F32))
    return Graph((x,), nodes, (Output("y", OutputKind.RESULT, Ref(nodes[-1].name)),))


X = Ref("x")
CASES = {
    "a transpose undone": (
        (
            node("a", "aten.t.default", (X,), (6, 2)),
            node("b", "aten.t.default", (Ref("a"),), (2, 6)),
            node("c", "aten.neg.default", (Ref("b"),), (2, 6)),
        ),
        ["%c: float32[2,6] = aten.neg.default(%x)"],
    ),
    "another transpose": (
        (
            node("a", "aten.transpose.int", (X, 0, 1), (6, 2)),
            node("b", "aten.transpose.int", (Ref("a"), -1, -2), (2, 6)),
            node("c", "aten.neg.default", (Ref("b"),), (2, 6)),
        ),
        ["%c: float32[2,6] = aten.neg.default(%x)"],
    ),
    "a reshape of a reshape": (
        (
            node("a", "aten.view.default", (X, (12,)), (12,)),
            node("b", "aten.view.default", (Ref("a"), (3, 4)), (3, 4)),
        ),
        ["%b: float32[3,4] = aten.view.default(%x, (3, 4))"],
    ),
    "a reshape back": (
        (
            node("a", "aten.view.default", (X, (12,)), (12,)),
            node("b", "aten.view.default", (Ref("a"), (2, 6)), (2, 6)),
            node("c", "aten.neg.default", (Ref("b"),), (2, 6)),
        ),
        ["%c: float32[2,6] = aten.neg.default(%x)"],
    ),
    "equal calls": (
        (
            node("a", "aten.exp.default", (X,), (2, 6)),
            node("b", "aten.exp.default", (X,), (2, 6)),
            node("c", "aten.add.Tensor", (Ref("a"), Ref("b")), (2, 6)),
        ),
        [
            "%a: float32[2,6] = aten.exp.default(%x)",
            "%c: float32[2,6] = aten.add.Tensor(%a, %a)",
        ],
    ),
    "a call that no output needs": (
        (
            node("a", "aten.exp.default", (X,), (2, 6)),
            node("b", "aten.neg.default", (X,), (2, 6)),
        ),
        ["%b: float32[2,6] = aten.neg.default(%x)"],
    ),
    "calls that differ in an argument": (
        (
            node("a", "aten.softmax.int", (X, 0), (2, 6)),
            node("b", "aten.softmax.int", (X, 1), (2, 6)),
            node("c", "aten.add.Tensor", (Ref("a"), Ref("b")), (2, 6)),
        ),
        [
            "%a: float32[2,6] = aten.softmax.int(%x, 0)",
            "%b: float32[2,6] = aten.softmax.int(%x, 1)",
            "%c: float32[2,6] = aten.add.Tensor(%a, %b)",
        ],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    nodes, wanted = CASES[name]
    before = graph(*nodes)
    after = simplify(before)
    after.verify()
    assert [str(n) for n in after.nodes] == wanted
    x = torch.arange(12.0).view(2, 6)
    assert torch.equal(interpret(after, {"x": x})[0], interpret(before, {"x": x})[0])


def test_an_output_that_is_forwarded_is_its_input() -> None:
    after = simplify(graph(node("a", "aten.detach.default", (X,), (2, 6))))
    assert not after.nodes
    assert after.outputs[0].ref == X


@pytest.mark.parametrize("name", ["llama", "t5", "resnet"])
def test_no_model_keeps_bookkeeping(name: str) -> None:
    chunk = differentiate(training_graph(eager(name).recording.graph))
    assert chunk.backward is not None
    for part in (chunk.forward, chunk.backward):
        assert not [n for n in part.nodes if n.op in FORWARDED]
        assert str(simplify(part)) == str(part)
