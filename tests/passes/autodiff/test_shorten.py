"""Graphs with one in the place of many equal blocks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from merakc.costs.work.kernels import graph_work
from merakc.costs.work.pieces import cut_pieces, part_starts
from merakc.frontend.record import record
from merakc.ir.graph import Graph, Ref
from merakc.lowering.lowered import training_graph
from merakc.passes.autodiff.shorten import graph_form, repeated, shorten

LAYERS = 8


class Blocks(nn.Module):
    """Layers one after the other; `kind` says what else they read."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        shared, seen = x * 2, [x]
        for k, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) + (shared if self.kind == "shared" else x)
            if self.kind == "turns":
                x = x.relu() if k % 2 else x.sigmoid() * x
            if self.kind == "skips" and k >= LAYERS // 2:
                x = x + seen[LAYERS - k]
            if self.kind == "scaled":
                x = layer(x) * (k + 1)
            seen.append(x)
        total = sum(seen[1:]) if self.kind == "sum" else x
        return {"loss": total.square().mean()}  # type: ignore[union-attr]


def graph_of(kind: str) -> Graph:
    return training_graph(record(Blocks(kind), (torch.ones(3, 8),), {}).graph)


@pytest.mark.parametrize("kind", ["plain", "shared", "turns"])
def test_parts_of_the_short_graph_cost_what_those_of_the_whole_do(kind: str) -> None:
    graph = graph_of(kind)
    short, counts = shorten(graph, part_starts(graph))
    assert len(short.nodes) < len(graph.nodes)
    assert sum(counts) == len(part_starts(graph))
    assert max(counts) >= (LAYERS - 3) // (1 + (kind == "turns"))
    forward: Counter[object] = Counter()
    for piece, count in zip(cut_pieces(short), counts, strict=True):
        forward.update({kernel: n * count for kernel, n in piece.work.forward.items()})
    assert forward == graph_work(graph).forward


def kinds_of(graph: Graph) -> list[str]:
    """What each block has of the calls that take turns."""
    starts = [first for _, first in part_starts(graph)]
    ops = [{n.op for n in graph.nodes[a:b]} for a, b in pairwise([*starts, len(graph.nodes)])]
    return [" ".join(sorted(own & {"aten.relu.default", "aten.sigmoid.default"})) for own in ops]


def test_blocks_that_take_turns_are_told_by_two_turns() -> None:
    graph = graph_of("turns")
    short, counts = shorten(graph, part_starts(graph))
    assert len(counts) < len(part_starts(graph))
    assert repeated(counts, kinds_of(short)) == kinds_of(graph)
    assert len({*kinds_of(graph)}) > 1


@pytest.mark.parametrize("kind", ["skips", "scaled", "sum"])
def test_blocks_that_are_unlike_or_read_from_afar_stay(kind: str) -> None:
    graph = graph_of(kind)
    short, counts = shorten(graph, part_starts(graph))
    if kind == "skips":
        assert len(counts) > LAYERS // 2
    else:
        assert short is graph
        assert set(counts) == {1}


@pytest.mark.parametrize("kind", ["plain", "shared"])
def test_each_block_more_adds_what_a_block_costs(kind: str) -> None:
    graph = graph_of(kind)
    starts = part_starts(graph)
    sizes = []
    for keep in range(2, LAYERS):
        short, counts = shorten(graph, starts, keep)
        assert sum(counts) == len(starts)
        sizes.append(len(short.nodes))
    assert len({b - a for a, b in pairwise(sizes) if b - a}) == 1


def test_graphs_of_one_form_differ_in_names_alone() -> None:
    one, other = graph_of("plain"), graph_of("shared")
    names = {Ref(n.name): Ref(f"{n.name}'") for n in one.nodes}
    renamed = one.renamed(names)
    nodes = tuple(replace(n, name=f"{n.name}'") for n in renamed.nodes)
    renamed = replace(renamed, nodes=nodes)
    assert graph_form(renamed) == graph_form(one)
    assert graph_form(other)[0] != graph_form(one)[0]
    assert len(set(graph_form(one)[1])) == len(one.inputs)
