"""Graphs in other people's forms: all of a graph is in them, and they compute the same."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import networkx as nx
import pytest
import sympy  # type: ignore[import-untyped]
import torch
from torch import nn

from benchmarks.models import MODELS
from merakc.errors import ConfigError
from merakc.frontend.record import record
from merakc.frontend.values.symbols import Number
from merakc.ir.export import to_fx, to_networkx
from merakc.ir.graph import Graph, InputKind, Ref
from merakc.lowering.lowered import training_graph
from merakc.passes.autodiff.interpret import interpret
from merakc.passes.pipeline import differentiate
from tests.frontend.small import Small, linear, randn

NAMES = ["gpt2", "bert", "t5"]


def recorded(name: str) -> tuple[Graph, nn.Module, dict[str, torch.Tensor]]:
    model = MODELS[name].model()
    batch = MODELS[name].make_batch(2, torch.Generator().manual_seed(0))
    return training_graph(record(model, (), batch).graph), model, batch


def values_of(graph: Graph, model: nn.Module, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    state = {**dict(model.named_parameters()), **dict(model.named_buffers()), **batch}
    found = {}
    for item in graph.inputs:
        if item.kind is not InputKind.CONSTANT:
            given = state.get(item.target)
            made = torch.randn(item.spec.shape).to(item.spec.dtype)
            found[item.name] = made if given is None else given.detach()
    return found


def check_fx(graph: Graph, values: dict[str, torch.Tensor]) -> None:
    wanted = interpret(graph, values)
    given = [values[i.name] for i in graph.inputs if i.kind is not InputKind.CONSTANT]
    found = to_fx(graph)(*given)
    assert torch.is_grad_enabled()
    assert len(found) == len(wanted) == len(graph.outputs)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", NAMES)
def test_fx_computes_what_the_graph_does(name: str) -> None:
    graph, model, batch = recorded(name)
    check_fx(graph, values_of(graph, model, batch))
    chunk = differentiate(graph)
    forward = chunk.forward
    check_fx(forward, values_of(forward, model, batch))


def test_fx_holds_constants_and_calls_without_gradients() -> None:
    def forward(s: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = x.abs().max(1).values
        first, second = s.layer(x).split(3, 1)
        loss: torch.Tensor = (first * second * torch.tensor([1.0, 2.0, 3.0])).sum(1) @ scale
        return loss

    model, x = Small(forward, layer=linear()), randn(4, 6)
    graph = record(model, (x,), {}).graph
    check_fx(graph, values_of(graph, model, {"0": x}))


def test_fx_refuses_numbers_that_values_say() -> None:
    graph = record(Small(lambda s, x: s.layer(x) * 2, layer=linear()), (randn(4, 6),), {}).graph
    *nodes, last = graph.nodes
    last = replace(last, args=(last.args[0], Number(sympy.Symbol("count"))))
    with pytest.raises(ConfigError, match=r"test_export.py:\d+: torch.fx cannot hold .* of count"):
        to_fx(replace(graph, nodes=(*nodes, last)))


def test_networkx_has_every_reading() -> None:
    graph, _, _ = recorded("gpt2")
    node = graph.nodes[5]
    found = to_networkx(graph, {node.name: {"stage": 1}}, {Ref(node.name): {"split": "0"}})
    assert nx.is_directed_acyclic_graph(found)
    assert len(found) == len(graph.inputs) + len(graph.nodes) + len(graph.outputs)
    assert found.number_of_edges() == sum(len(n.refs) for n in graph.nodes) + len(graph.outputs)
    facts = found.nodes[node.name]
    assert facts["op"] == node.op
    assert facts["stage"] == 1
    assert facts["bytes"] == node.spec.size_bytes
    assert facts["source"] == node.source
    for _, _, edge in found.out_edges(node.name, data=True):
        assert edge["split"] == "0"
        assert edge["source"] == node.source
    json.dumps(nx.node_link_data(found, edges="edges"))
    nx.write_graphml(found, io.BytesIO())
