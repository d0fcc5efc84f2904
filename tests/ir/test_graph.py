"""Graphs: text form, verification, and the questions passes ask of them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from merakc.ir.graph import (
    Graph,
    Input,
    InputKind,
    Node,
    Output,
    OutputKind,
    Ref,
    TensorSpec,
    dtype_name,
    format_arg,
    iter_refs,
    map_refs,
)

X = TensorSpec((2, 3), torch.float32)
W = TensorSpec((4, 3), torch.float32)
H = TensorSpec((2, 4), torch.float32)
INDEX = TensorSpec((2,), torch.int64)
VALUE = TensorSpec((2,), torch.float32)


def _node(name: str, op: str, *args: object, outputs: tuple[TensorSpec | None, ...]) -> Node:
    return Node(name, op, args, (), outputs, module="proj", source="model.py:7")


# y = x @ W.T in float32; its largest entries are the result, and a branch is never read.
GRAPH = Graph(
    inputs=(
        Input("proj_weight", InputKind.PARAMETER, W, "proj.weight", requires_grad=True),
        Input("x", InputKind.BATCH, X, "x"),
    ),
    nodes=(
        Node(
            "cast",
            "aten._to_copy.default",
            (Ref("x"),),
            (("dtype", torch.float32),),
            (X,),
            grad=False,
        ),
        _node("linear", "aten.linear.default", Ref("cast"), Ref("proj_weight"), outputs=(H,)),
        _node("unread", "aten.relu.default", Ref("linear"), outputs=(H,)),
        _node("max", "aten.max.dim", Ref("linear"), 1, outputs=(VALUE, INDEX)),
        _node("stack", "aten.stack.default", (Ref("max"), Ref("max")), outputs=(H,)),
    ),
    outputs=(
        Output("values", OutputKind.RESULT, Ref("stack")),
        Output("indices", OutputKind.RESULT, Ref("max", 1)),
    ),
)

TEXT = """\
parameter %proj_weight: float32[4,3] proj.weight
batch %x: float32[2,3] x
%cast: float32[2,3] = aten._to_copy.default(%x, dtype=float32) no_grad
%linear: float32[2,4] = aten.linear.default(%cast, %proj_weight)
%unread: float32[2,4] = aten.relu.default(%linear)
%max: float32[2], int64[2] = aten.max.dim(%linear, 1)
%stack: float32[2,4] = aten.stack.default((%max, %max))
result values = %stack
result indices = %max:1"""


def test_text_form() -> None:
    GRAPH.verify()
    assert str(GRAPH) == TEXT


def _with(**changes: object) -> Graph:
    return dataclasses.replace(GRAPH, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (_with(inputs=GRAPH.inputs * 2), "input proj_weight appears twice"),
        (_with(nodes=GRAPH.nodes + GRAPH.nodes[:1]), "node cast appears twice"),
        (_with(nodes=GRAPH.nodes[::-1]), "stack reads %max, which is not defined yet"),
        (_with(nodes=GRAPH.nodes[1:]), "linear reads %cast, which is not defined yet"),
        (_with(nodes=GRAPH.nodes[:-1]), "output values reads %stack"),
        (
            _with(nodes=(*GRAPH.nodes, _node("y", "op", Ref("max", 2), outputs=(H,)))),
            "y reads %max:2: no such output",
        ),
    ],
)
def test_verify_names_what_is_wrong(graph: Graph, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        graph.verify()


def test_specs_have_every_value() -> None:
    specs = GRAPH.specs()
    assert specs[Ref("x")] == X
    assert specs[Ref("max", 1)] == INDEX
    assert len(specs) == 2 + 6


def test_specs_leave_out_what_is_no_tensor() -> None:
    graph = _with(nodes=(_node("pair", "op", outputs=(None, H)),), outputs=())
    assert Ref("pair") not in graph.specs()
    with pytest.raises(AssertionError, match="pair has no tensor output"):
        _ = graph.nodes[0].spec


def test_users_are_in_program_order_and_once_each() -> None:
    names = {name: [n.name for n in nodes] for name, nodes in GRAPH.users().items()}
    assert names == {
        "proj_weight": ["linear"],
        "x": ["cast"],
        "cast": ["linear"],
        "linear": ["unread", "max"],
        "unread": [],
        "max": ["stack"],
        "stack": [],
    }


def test_grad_values_follow_differentiable_calls_of_floats() -> None:
    assert GRAPH.grad_values() == {
        Ref("proj_weight"),
        Ref("linear"),
        Ref("unread"),
        Ref("max"),
        Ref("stack"),
    }


@pytest.mark.parametrize(
    "stop",
    [
        Node("stop", "aten.detach.default", (Ref("proj_weight"),), (), (W,)),
        Node("stop", "aten.relu.default", (Ref("proj_weight"),), (), (W,), grad=False),
    ],
    ids=["detach", "no_grad"],
)
def test_grad_values_stop_at(stop: Node) -> None:
    after = _node("after", "aten.relu.default", Ref("stop"), outputs=(W,))
    graph = Graph(GRAPH.inputs, (stop, after), ())
    assert graph.grad_values() == {Ref("proj_weight")}


def test_pruned_drops_what_no_output_needs() -> None:
    pruned = GRAPH.pruned()
    pruned.verify()
    assert [n.name for n in pruned.nodes] == ["cast", "linear", "max", "stack"]
    assert pruned.inputs == GRAPH.inputs
    assert _with(outputs=()).pruned().nodes == ()


def test_inputs_and_constants_that_nothing_reads_are_dropped() -> None:
    constants = {"x": torch.zeros(2, 3), "proj_weight": torch.zeros(4, 3)}
    handed = Output("x", OutputKind.RESULT, Ref("x"))
    found = dataclasses.replace(
        GRAPH, nodes=(), outputs=(handed,), constants=constants
    ).without_unread_inputs()
    assert [i.name for i in found.inputs] == ["x"]
    assert found.constants.keys() == {"x"}
    assert GRAPH.without_unread_inputs() == GRAPH


def test_renamed_reaches_nested_arguments_and_outputs() -> None:
    renamed = GRAPH.renamed({Ref("max"): Ref("linear"), Ref("max", 1): Ref("x")})
    assert renamed.nodes[-1].args == ((Ref("linear"), Ref("linear")),)
    assert [o.ref for o in renamed.outputs] == [Ref("stack"), Ref("x")]
    assert [n.name for n in renamed.nodes] == [n.name for n in GRAPH.nodes]


def test_renamed_reaches_keyword_arguments() -> None:
    node = Node("add", "aten.add.Tensor", (Ref("x"),), (("other", Ref("x")),), (X,))
    renamed = Graph(GRAPH.inputs, (node,), ()).renamed({Ref("x"): Ref("proj_weight")})
    assert renamed.nodes[0].refs == (Ref("proj_weight"),) * 2


def test_constants_and_functions_are_kept_and_not_compared() -> None:
    extra = _with(constants={"mask": torch.ones(2)}, functions={"mine": abs})
    assert extra == GRAPH
    for graph in (extra.pruned(), extra.renamed({})):
        assert graph.constants is extra.constants
        assert graph.functions is extra.functions


def test_sizes() -> None:
    assert TensorSpec((2, 3), torch.bfloat16).size_bytes == 12
    assert TensorSpec((), torch.float64).numel == 1
    assert TensorSpec((), torch.float64).size_bytes == 8
    assert TensorSpec((4, 0), torch.float64).size_bytes == 0


def test_arguments() -> None:
    nest = (Ref("a"), 2, ("b", (Ref("c", 1),)), torch.bool)
    assert list(iter_refs(nest)) == [Ref("a"), Ref("c", 1)]
    assert map_refs(nest, str) == ("%a", 2, ("b", ("%c:1",)), torch.bool)
    assert format_arg(nest) == "(%a, 2, ('b', (%c:1)), bool)"
    assert dtype_name(torch.float8_e4m3fn) == "float8_e4m3fn"


def test_a_value_of_a_shape_alone_needs_no_gradient() -> None:
    spec = TensorSpec((2,), torch.float32)
    for op, needs in (("aten.zeros_like.default", False), ("aten.exp.default", True)):
        node = Node("y", op, (Ref("x"),), (), (spec,))
        assert bool(node.grad_outputs({Ref("x")})) is needs
