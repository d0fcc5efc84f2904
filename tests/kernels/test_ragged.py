"""Packed sequences: the calls of `merakc.kernels.ragged` are those of `torch.nn.utils.rnn`."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import rnn

from merakc.kernels.ragged import CALLS, RECURRENT, batch_sizes, pack, unpack

LENGTHS = torch.tensor([5, 3, 3, 1])


@pytest.mark.parametrize("batch_first", [True, False])
def test_packing_and_back(batch_first: bool) -> None:
    x = torch.randn(4, 5, 2) if batch_first else torch.randn(5, 4, 2)
    wanted = rnn.pack_padded_sequence(x, LENGTHS, batch_first)
    data, sizes = pack(x, LENGTHS, batch_first), batch_sizes(LENGTHS)
    assert torch.equal(data, wanted.data)
    assert torch.equal(sizes, wanted.batch_sizes)
    padded, lengths = unpack(data, sizes, batch_first, -1.0, 7)
    again, _ = rnn.pad_packed_sequence(wanted, batch_first, -1.0, 7)
    assert torch.equal(padded, again)
    assert torch.equal(lengths, LENGTHS)


def test_a_layer_over_packed_sequences() -> None:
    layer = nn.GRU(2, 3)
    packed = rnn.pack_padded_sequence(torch.randn(5, 4, 2), LENGTHS)
    wanted, _ = layer(packed)
    params = list(layer.parameters())
    states = torch.zeros(1, 4, 3)
    found, _ = CALLS["ragged.gru"](
        packed.data, packed.batch_sizes, states, params, True, 1, 0.0, True, False
    )
    torch.testing.assert_close(found, wanted.data)
    assert {f"ragged.{name}" for name in RECURRENT} <= CALLS.keys()
