from __future__ import annotations

import torch

from merakc.analysis.aliases import equal_values, last_uses, owned_outputs, view_roots
from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorSpec

SPEC = TensorSpec((4, 4), torch.float64)


def test_views_and_what_they_look_at_are_not_owned() -> None:
    x = Input("x", InputKind.BATCH, SPEC, "x")
    nodes = (
        Node("own", "aten.sin.default", (Ref("x"),), (), (SPEC,)),
        Node("base", "aten.cos.default", (Ref("x"),), (), (SPEC,)),
        Node("view", "aten.t.default", (Ref("base"),), (), (SPEC,)),
    )
    outputs = tuple(Output(n, OutputKind.GRADIENT, Ref(n)) for n in ("own", "base", "view", "x"))
    assert owned_outputs(Graph((x,), nodes, outputs)) == {"own"}
    alone = (outputs[0], outputs[1])
    assert owned_outputs(Graph((x,), nodes, alone)) == {"own", "base"}


def chain(*steps: tuple[str, str, str]) -> Graph:
    x = Input("x", InputKind.BATCH, SPEC, "x")
    nodes = tuple(Node(n, f"aten.{op}", (Ref(read),), (), (SPEC,)) for n, op, read in steps)
    return Graph((x,), nodes, ())


CHAIN = chain(
    ("v", "t.default", "x"), ("w", "reshape.default", "v"), ("y", "exp.default", "w"),
    ("z", "detach.default", "y"),
)  # fmt: skip


def test_views_are_seen_through_to_what_has_memory() -> None:
    assert view_roots(CHAIN) == {Ref("v"): Ref("x"), Ref("w"): Ref("x"), Ref("z"): Ref("y")}


def test_who_asks_says_what_looks_at_memory() -> None:
    def through_exp(node: Node, root: Ref) -> bool:
        return node.op != "aten.detach.default" and root == Ref("x")

    assert view_roots(CHAIN, through_exp) == dict.fromkeys(map(Ref, "vwy"), Ref("x"))


def test_memory_is_used_until_the_last_value_in_it_is_read() -> None:
    owner = {Ref("x"): Ref("x"), Ref("v"): Ref("x"), Ref("w"): Ref("x"), Ref("y"): Ref("y")}
    assert last_uses(CHAIN, owner) == {Ref("x"): 2, Ref("y"): 3}


def test_what_equal_calls_give_is_one_value() -> None:
    spec = TensorSpec((2,), torch.float32)

    def call(name: str, of: str, number: object) -> Node:
        return Node(name, "aten.add.Scalar", (Ref(of), number), (), (spec,))

    nodes = (
        call("a", "x", 1), call("b", "x", 1), call("c", "x", 1.0), call("d", "b", 2),
        call("e", "a", 2), call("f", "d", 2),
    )  # fmt: skip
    graph = Graph((Input("x", InputKind.BATCH, spec, "x"),), nodes, ())
    assert equal_values(graph) == {Ref("b"): Ref("a"), Ref("e"): Ref("d")}
