"""A stage to move values of: a chain of products and functions."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from merakc.costs.device import Place, place_on
from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorSpec
from merakc.ir.program import ActionKind, StageGraphs
from merakc.machines.cluster import NOMINAL_GPU
from merakc.machines.links import Host
from merakc.passes.autodiff.split_backward import split_backward
from merakc.passes.pipeline import differentiate

SIDE, LAYERS = 64, 6
WHOLE = (ActionKind.FORWARD, ActionKind.BACKWARD)
SPLIT = (ActionKind.FORWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD)


@cache
def chain(*, split: bool = False) -> StageGraphs:
    """The pieces of a stage that saves what each product and each function makes."""
    spec = TensorSpec((SIDE, SIDE), torch.float64)
    x = Input("x", InputKind.ACTIVATION, spec, "x", True)
    weights = [Input(f"w{k}", InputKind.PARAMETER, spec, f"w{k}", True) for k in range(LAYERS)]
    nodes, last = [], Ref("x")
    for k in range(LAYERS):
        nodes.append(Node(f"p{k}", "aten.mm.default", (last, Ref(f"w{k}")), (), (spec,)))
        nodes.append(Node(f"t{k}", "aten.tanh.default", (Ref(f"p{k}"),), (), (spec,)))
        nodes.append(Node(f"s{k}", "aten.sin.default", (Ref(f"t{k}"),), (), (spec,)))
        last = Ref(f"s{k}")
    outputs = (Output("y", OutputKind.ACTIVATION, last),)
    stage = differentiate(Graph((x, *weights), tuple(nodes), outputs))
    if not split:
        return stage
    input_grad, weight_grad = split_backward(stage)
    return replace(stage, input_grad=input_grad, weight_grad=weight_grad)


def at(bytes_per_s: float) -> Place:
    """A device whose host launches calls in no time, with so fast a link to its memory."""
    host = Host(1 << 30, 1e9, bytes_per_s, bytes_per_s)
    return place_on(replace(NOMINAL_GPU, op_overhead_s=0.0, host=host), 1)
