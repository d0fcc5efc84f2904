"""Runs a `Graph` node by node with torch: on tensors, fake tensors or `make_fx` proxies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from merakc.ir.graph import Graph, Node, Ref, map_refs
from merakc.kernels.ops import resolve_op


def run_node(graph: Graph, node: Node, values: dict[Ref, Any]) -> None:
    """Runs one node and stores its outputs in `values`."""
    args = map_refs(node.args, values.__getitem__)
    kwargs = {k: map_refs(v, values.__getitem__) for k, v in node.kwargs}
    with contextlib.nullcontext() if node.grad else torch.no_grad():
        call = graph.functions.get(node.op) or resolve_op(node.op)
        out = call(*args, **kwargs)
    if isinstance(out, (tuple, list)):
        for index, item in enumerate(out):
            values[Ref(node.name, index)] = item
    else:
        values[Ref(node.name)] = out


def _ignore(node: Node) -> None:
    del node


def interpret(
    graph: Graph, inputs: Mapping[str, Any], before: Callable[[Node], None] = _ignore
) -> list[Any]:
    """The outputs of the graph for these input values (by name), in order.

    Constants are taken from the graph where `inputs` does not give them. Each node is handed to
    `before` before it runs.
    """
    values: dict[Ref, Any] = {
        Ref(i.name): inputs[i.name] if i.name in inputs else graph.constants[i.name]
        for i in graph.inputs
    }
    for node in graph.nodes:
        before(node)
        run_node(graph, node, values)
    return [values[o.ref] for o in graph.outputs]
