"""A model's layers, as the cost model of sharded state sees them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.zero_study.layers import graph_layers
from merakc.costs.device import place_on
from merakc.costs.nodes import node_seconds
from merakc.frontend.record import record
from merakc.ir.graph import Graph
from merakc.machines.cluster import NOMINAL_GPU

WIDTH, DEPTH = 16, 5


def recorded() -> Graph:
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)]
    layers[1].weight.requires_grad_(False)
    model = nn.Sequential(*layers, layers[0])  # the first is used twice
    return record(model, (torch.zeros(4, WIDTH),), {}).graph


@pytest.mark.parametrize("bucket_bytes", [1, WIDTH * WIDTH * 8, 10**9])
def test_every_trained_parameter_and_every_second_count_once(bucket_bytes: int) -> None:
    graph = recorded()
    layers = graph_layers(graph, NOMINAL_GPU, bucket_bytes)
    place, specs = place_on(NOMINAL_GPU, 1), graph.specs()
    total_s = sum(node_seconds(node, specs, place) for node in graph.nodes)
    assert sum(y.parameters for y in layers) == DEPTH * (WIDTH + 1) * WIDTH - WIDTH * WIDTH
    assert sum(y.forward_s for y in layers) == pytest.approx(total_s)
    assert all(y.backward_s == 2 * y.forward_s for y in layers)
    assert len(layers) == {1: DEPTH, 10**9: 1}.get(bucket_bytes, 2)


def test_recomputation_runs_a_forward_again() -> None:
    (layer,) = graph_layers(recorded(), NOMINAL_GPU, 10**9, recompute=True)
    assert layer.backward_s == 3 * layer.forward_s
