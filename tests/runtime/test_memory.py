from __future__ import annotations

import torch

from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorSpec
from merakc.runtime.memory import owned_outputs

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
