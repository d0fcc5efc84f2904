"""The GPT of the fidelity benchmark."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from benchmarks.gpt import DROPPED, GPT, RECORDED_LAYERS, Shape, drop, gpt_graph, gpt_pieces
from merakc.costs.work.pieces import cut_pieces

SHAPE = Shape(32, 4, 5, 16, 64, "fused")


def test_dropout_keeps_the_mean() -> None:
    torch.manual_seed(0)
    out = drop(torch.ones(100_000))
    assert out.mean() == pytest.approx(1.0, abs=0.01)
    assert (out == 0).double().mean() == pytest.approx(DROPPED, abs=0.01)


def test_both_ways_of_attention_are_the_same_function() -> None:
    model = GPT(SHAPE).double()
    torch.nn.init.normal_(model.places)
    q, k, v = (torch.randn(2, 4, 16, 8, dtype=torch.double) for _ in range(3))
    block = model.blocks[0]
    fused = block.attend(q, k, v, model.future)
    block.attention = "parts"
    block.drop = lambda x: x
    assert torch.allclose(block.attend(q, k, v, model.future), fused)


def test_the_loss_is_that_of_a_model_that_knows_nothing() -> None:
    torch.manual_seed(0)
    model = GPT(SHAPE)
    torch.nn.init.zeros_(model.words.weight)
    torch.nn.init.zeros_(model.places)
    ids = torch.randint(64, (2, 16))
    nothing = F.cross_entropy(torch.zeros(1, 64), ids[:1, 0])
    assert model(ids, ids).item() == pytest.approx(nothing.item(), rel=1e-5)


@pytest.mark.parametrize("tp", [1, 2])
def test_pieces_of_few_layers_are_those_of_all(tp: int) -> None:
    assert SHAPE.layers > RECORDED_LAYERS
    assert gpt_pieces(SHAPE, 2, tp)[1:-1] == tuple(
        p for p in gpt_pieces(SHAPE, 2, tp) if p.path == "blocks"
    )
    whole = cut_pieces(gpt_graph(SHAPE, 2, tp), fused=True)
    found = gpt_pieces(SHAPE, 2, tp)
    assert [p.work for p in found] == [p.work for p in whole]
    assert [p.saved_bytes for p in found] == [p.saved_bytes for p in whole]
    assert [p.parameter_count for p in found] == [p.parameter_count for p in whole]
