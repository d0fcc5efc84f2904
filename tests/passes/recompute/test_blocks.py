"""Blocks are told by what passes between them, and layers by their form."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.models import MODELS
from merakc.frontend.record import record
from merakc.ir.graph import Graph
from merakc.ir.strategy import Strategy
from merakc.lowering.lowered import make_plan
from merakc.machines.cluster import NOMINAL_CPU
from merakc.passes.pipeline import called_pieces
from merakc.passes.recompute.blocks import Block, find_blocks, find_layers, in_place
from tests.battery.test_recompute import Chain, Skips, rows


def forward_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> Graph:
    lowered = make_plan(record(model, (), batch), Strategy(), NOMINAL_CPU)
    return in_place(called_pieces(lowered.stages.local[0]).forward)


def stock(name: str, **sizes: int) -> Graph:
    model = MODELS[name].model()
    config = model.config
    for key, value in sizes.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    return forward_of(type(model)(config).train(), MODELS[name].batch(2))


@pytest.mark.parametrize(
    ("name", "sizes"), [("gpt2", {"n_layer": 8}), ("llama", {"num_hidden_layers": 8})]
)
def test_layers_are_found_whatever_modules_are_called(name: str, sizes: dict[str, int]) -> None:
    forward = stock(name, **sizes)
    blocks = find_blocks(forward)
    assert [b.start for b in blocks[1:]] == [b.end for b in blocks[:-1]]
    assert (blocks[0].start, blocks[-1].end) == (0, len(forward.nodes))
    (layers,) = find_layers(blocks)
    assert layers.period == 2  # attention, and the rest
    assert layers.end - layers.start >= 12
    specs = forward.specs()
    hidden = {specs[r].size_bytes for b in blocks[layers.start : layers.end] for r in b.crossing}
    assert len(hidden) == 1
    nameless = replace(forward, nodes=tuple(replace(n, module="") for n in forward.nodes))
    assert find_blocks(nameless) == blocks


def test_an_encoder_and_a_decoder_have_layers_each() -> None:
    blocks = find_blocks(stock("t5", num_layers=6, num_decoder_layers=6))
    assert len(find_layers(blocks)) >= 2


def test_chains_and_skips_are_cut() -> None:
    chain = find_blocks(forward_of(Chain(), rows()))
    assert len(chain) >= 12
    skips = find_blocks(forward_of(Skips(), rows()))
    assert len(skips) >= 6


def test_repetitions_are_found_in_order() -> None:
    forms = [0, 1, 2, 1, 2, 1, 2, 3, 4, 4, 4, 5]
    blocks = [Block(k, k + 1, form, ()) for k, form in enumerate(forms)]
    found = [(x.start, x.end, x.period) for x in find_layers(blocks)]
    assert found == [(1, 7, 2), (8, 11, 1)]
