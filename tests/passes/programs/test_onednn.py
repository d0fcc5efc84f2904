"""Which products oneDNN computes, and that everything else sees the same chunk."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from merakc.costs.work.flops import graph_flops, node_bytes
from merakc.costs.work.kernels import graph_work
from merakc.costs.work.memory import order_bytes
from merakc.frontend.record import record
from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorSpec
from merakc.ir.program import ActionKind, StageGraphs
from merakc.kernels.gemm import LEAST_FLOPS, OPS
from merakc.passes.autodiff.split_backward import split_backward
from merakc.passes.pipeline import differentiate
from merakc.passes.programs.onednn import by_onednn

ROWS, SIDE = 64, 512
assert 2 * ROWS * SIDE**2 > LEAST_FLOPS
ORDER = (ActionKind.FORWARD, ActionKind.BACKWARD)


def call(op: str, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, **more: Any) -> str:
    """The op that takes the place of one on values of these shapes."""
    inputs = tuple(
        Input(f"i{k}", InputKind.BATCH, TensorSpec(shape, dtype)) for k, shape in enumerate(shapes)
    )
    out = TensorSpec((shapes[-2][0], shapes[-1][1]), dtype)
    args = tuple(Ref(i.name) for i in inputs)
    node = Node("n", op, args, tuple(more.items()), (out,))
    graph = Graph(inputs, (node,), (Output("n", OutputKind.RESULT, Ref("n")),))
    return by_onednn(StageGraphs(graph, None)).forward.nodes[0].op


def test_large_products_of_float32_are() -> None:
    large, small = (SIDE, SIDE), (16, 16)
    assert call("aten.mm.default", large, large) == "merakc.mm.default"
    assert call("aten.addmm.default", (SIDE,), large, large) == "merakc.addmm.default"
    assert call("aten.mm.default", small, small) == "aten.mm.default"
    for dtype in (torch.float64, torch.bfloat16):
        assert call("aten.mm.default", large, large, dtype=dtype) == "aten.mm.default"
    assert call("aten.addmm.default", large, large, large) == "aten.addmm.default"
    assert call("aten.addmm.default", (SIDE,), large, large, beta=2) == "aten.addmm.default"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_in_blocks_are_told(dtype: torch.dtype) -> None:
    shapes = {"x": (ROWS, SIDE), "w": (SIDE, SIDE), "l": (ROWS,)}
    dtypes = {"x": dtype, "w": dtype, "l": torch.int64}
    inputs = tuple(
        Input(n, InputKind.BATCH, TensorSpec(shape, dtypes[n])) for n, shape in shapes.items()
    )
    args = (Ref("x"), Ref("w"), None, Ref("l"), 0, SIDE, -100, False)
    spec = TensorSpec((ROWS,), dtype)
    node = Node("n", "merakc.scores.default", args, (), (spec, spec))
    graph = Graph(inputs, (node,), (Output("n", OutputKind.RESULT, Ref("n")),))
    (told,) = by_onednn(StageGraphs(graph, None)).forward.nodes
    assert told.args == (*args[:-1], dtype == torch.float32)


def chunk() -> StageGraphs:
    model = torch.nn.Sequential(
        torch.nn.Linear(SIDE, SIDE), torch.nn.Linear(SIDE, SIDE, bias=False)
    )
    graph = record(torch.nn.Sequential(model, Total()), (torch.randn(ROWS, SIDE),), {}).graph
    made = differentiate(graph)
    input_grad, weight_grad = split_backward(made)
    return replace(made, input_grad=input_grad, weight_grad=weight_grad)


class Total(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().sum()


def test_in_every_graph_of_a_chunk_with_the_same_costs() -> None:
    before, after = chunk(), by_onednn(chunk())
    for name in ("forward", "backward", "weight_grad"):
        old, new = getattr(before, name), getattr(after, name)
        ops = {n.op for n in new.nodes}
        assert ops & set(OPS.values())
        assert not ops & OPS.keys()
        assert graph_flops(new) == graph_flops(old)
        assert graph_work(new) == graph_work(old)
        moved = [[node_bytes(n, g.specs()) for n in g.nodes] for g in (old, new)]
        assert moved[0] == moved[1]
    assert after.checkpoint is None


@pytest.mark.parametrize("later", [False, True])
def test_gradients_that_are_added_up_are_made_before(later: bool) -> None:
    """oneDNN adds nothing to what is there, and weights are the largest tensors here."""
    old, new = (order_bytes(c, ORDER, later=later) for c in (chunk(), by_onednn(chunk())))
    assert new[1].peak_bytes == (SIDE * SIDE * 4 if later else old[1].peak_bytes)
    assert (new[1].peak_bytes > old[1].peak_bytes) is later
    assert new[1].gradient_bytes == old[1].gradient_bytes
