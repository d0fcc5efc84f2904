"""A forward in pieces."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from benchmarks.gpt import Shape, gpt_graph, gpt_pieces
from merakc.costs.work.kernels import Work, graph_work
from merakc.costs.work.memory import order_bytes
from merakc.costs.work.pieces import cut_pieces
from merakc.frontend.record import record
from merakc.ir.program import ActionKind
from merakc.passes.pipeline import called_pieces

SHAPE = Shape(128, 4, 4, 64, 512)
BATCH = 2


def test_the_pieces_of_a_gpt() -> None:
    pieces = cut_pieces(gpt_graph(SHAPE, BATCH, 1))
    assert [p.path for p in pieces] == ["", "blocks", "blocks", "blocks", "blocks", ""]
    before, *blocks, after = pieces
    h = SHAPE.hidden_size
    assert {p.parameter_count for p in blocks} == {12 * h * h + 13 * h}
    assert before.parameters == {"words.weight": 512 * h, "places": 64 * h}
    assert after.parameters == {"words.weight": 512 * h, "norm.weight": h, "norm.bias": h}
    assert [p.handed_bytes for p in pieces] == [2 * BATCH * 64 * h] * 5 + [0]
    assert blocks[0].work == blocks[1].work


@pytest.mark.parametrize("tp", [1, 2])
def test_pieces_are_all_of_the_work(tp: int) -> None:
    graph = gpt_graph(SHAPE, BATCH, tp)
    total = Work()
    for piece in cut_pieces(graph, fused=True):
        total.forward.update(piece.work.forward)
        total.backward.update(piece.work.backward)
    whole = graph_work(graph, fused=True)
    assert (total.forward, total.backward) == (whole.forward, whole.backward)


@pytest.mark.parametrize(("tp", "heads"), [(1, 4), (2, 4), (4, 8)])
def test_activations_are_those_of_the_formula(tp: int, heads: int) -> None:
    """Korthikanti et al. 2022, equation 2: s b h (10 + 24 / t + 5 a s / (h t))."""
    shape = replace(SHAPE, heads=heads)
    s, h = shape.seq_len, shape.hidden_size
    block = gpt_pieces(shape, BATCH, tp)[2]
    formula = s * BATCH * h * (10 + 24 / tp + 5 * heads * s / (h * tp))
    assert block.saved_bytes == pytest.approx(formula, rel=0.01)


@pytest.mark.parametrize("attention", ["parts", "fused"])
def test_activations_are_those_that_the_derivative_keeps(attention: str) -> None:
    shape = replace(SHAPE, attention=attention)  # type: ignore[arg-type]
    graph = gpt_graph(shape, BATCH, 1)
    kept = order_bytes(called_pieces(graph), (ActionKind.FORWARD, ActionKind.BACKWARD))[0]
    told = sum(p.saved_bytes for p in cut_pieces(graph))
    assert told == pytest.approx(kept.held_bytes, rel=0.10)


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.right = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.alone = nn.ModuleList([nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.left:
            x = torch.relu(layer(x))
        x = x * 2.0
        for layer in self.right:
            x = layer(x)
        return self.alone[0](x).sum()


def test_several_kinds_of_blocks() -> None:
    graph = record(Towers(), (torch.ones(4, 8),), {}).graph
    pieces = cut_pieces(graph)
    assert [p.path for p in pieces] == ["left", "left", "", "right", "right", "right", ""]
    assert [p.parameter_count for p in pieces] == [72, 72, 0, 72, 72, 72, 72]
    total = sum((p.work.forward for p in pieces), start=Work().forward)
    assert total == graph_work(graph).forward


def test_a_model_without_blocks_is_one_piece() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    (piece,) = cut_pieces(record(model, (torch.ones(4, 8),), {}).graph)
    assert (piece.path, piece.parameter_count) == ("", 72)
