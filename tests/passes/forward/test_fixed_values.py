"""Values that follow from constants, and rows that no table has."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from merakc.errors import ForwardError
from merakc.frontend.record import record
from merakc.ir.graph import Ref
from merakc.passes.forward.fixed_values import EMBEDDING, FixedValues, check_lookups


class Shifted(nn.Module):
    """As some models count their positions from 2 on."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, 8), nn.Embedding(16, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1]).expand(ids.shape) + 2
        return (self.words(ids) + self.places(places)).mean()


@pytest.mark.parametrize(("length", "fits"), [(14, True), (15, False)])
def test_positions_beyond_the_table_are_refused(length: int, fits: bool) -> None:
    graph = record(Shifted(), (torch.zeros(2, length, dtype=torch.long),), {}).graph
    if fits:
        check_lookups(graph)
        return
    with pytest.raises(ForwardError, match=r"rows 2 to 16 of 'places.weight', which has 16, at .*"):
        check_lookups(graph)


def test_positions_of_a_stock_model() -> None:
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=16)
    ids = torch.zeros(2, 17, dtype=torch.long)
    graph = record(GPT2LMHeadModel(config), (), {"input_ids": ids, "labels": ids}).graph
    with pytest.raises(ForwardError, match=r"'transformer\.wpe\.weight', which has 16, at"):
        check_lookups(graph)


def test_what_the_batch_decides_is_not_fixed() -> None:
    graph = record(Shifted(), (torch.zeros(2, 8, dtype=torch.long),), {}).graph
    fixed = FixedValues(graph)
    words, places = [n.args[1] for n in graph.nodes if n.op == EMBEDDING]
    assert isinstance(words, Ref)
    assert words.node not in fixed.names
    expected = torch.arange(2, 10).expand(2, 8)
    assert torch.equal(torch.as_tensor(fixed.whole(places)), expected)
