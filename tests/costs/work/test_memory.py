"""What a compute of a micro-batch holds."""

from __future__ import annotations

import torch

from merakc.costs.work.memory import order_bytes
from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorSpec
from merakc.ir.program import ActionKind, StageGraphs

VIEW, CALL = "aten.alias.default", "aten.maximum.default"


def spec(size: int) -> TensorSpec:
    return TensorSpec((size,), torch.int8)


def test_saved_bytes_are_the_saved_values_and_the_received_activations_that_they_need() -> None:
    x = Input("x", InputKind.ACTIVATION, spec(4))
    unread = Input("u", InputKind.ACTIVATION, spec(100))
    weight = Input("w", InputKind.PARAMETER, spec(50))
    y, z = (Node(n, CALL, (Ref("x"), Ref("w")), (), (spec(s),)) for n, s in (("y", 7), ("z", 9)))
    view = Node("v", VIEW, (Ref("y"),), (), (spec(7),))
    saved = tuple(Output(n, OutputKind.SAVED, Ref(n)) for n in ("y", "v", "w"))
    forward = Graph((x, unread, weight), (y, z, view), saved)
    backward = Graph((x, weight, Input("saved:%y", InputKind.SAVED, spec(7), "y")), (), ())
    order = ActionKind.FORWARD, ActionKind.BACKWARD
    assert [b.held_bytes for b in order_bytes(StageGraphs(forward, backward), order)] == [7 + 4, 0]
    assert order_bytes(StageGraphs(forward, None), order)[0].held_bytes == 0
