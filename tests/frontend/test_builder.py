"""Names, inputs and outputs of a graph that is being written."""

from __future__ import annotations

import pytest
import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from merakc.errors import RecordError
from merakc.frontend.builder import GraphBuilder
from merakc.ir.graph import InputKind, OutputKind, Ref


def test_a_graph_by_hand() -> None:
    builder = GraphBuilder(FakeTensorMode(allow_non_fake_inputs=True))
    leaves, _ = pytree.tree_flatten_with_path(((torch.ones(2, 3), 4), {}))
    x, four = [builder.batch_input(path, leaf) for path, leaf in leaves]
    assert isinstance(x, FakeTensor)
    assert four == 4
    table = torch.ones(3)
    for _ in range(2):
        with builder.fake_mode:
            out = torch.empty(2, 3)
        args = (builder._ref(x), builder._args([table, 2.0]))
        builder.aliases.add(out, builder._emit("aten.add.Tensor", args, {}, (out,)))
    names, _ = builder.finish({"loss": out, "note": "text"})
    graph = builder.graph()
    graph.verify()
    assert [(i.name, i.kind) for i in graph.inputs] == [
        ("0", InputKind.BATCH),
        ("constant", InputKind.CONSTANT),
    ]
    assert [n.name for n in graph.nodes] == ["add", "add_1"]
    assert graph.nodes[1].args == (Ref("0"), (Ref("constant"), 2.0))
    assert [(o.name, o.kind, o.ref) for o in graph.outputs] == [
        ("loss", OutputKind.RESULT, Ref("add_1"))
    ]
    assert names == ("loss", "text")
    assert graph.constants["constant"] is not table


def test_a_batch_that_wants_gradients_is_refused() -> None:
    builder = GraphBuilder(FakeTensorMode())
    ((path, leaf),) = pytree.tree_flatten_with_path(((torch.ones(2, requires_grad=True),), {}))[0]
    with pytest.raises(RecordError, match="tensor '0' of the batch requires a gradient"):
        builder.batch_input(path, leaf)
