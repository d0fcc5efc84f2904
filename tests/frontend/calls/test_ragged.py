"""Sequences of several lengths: packed ones, and `ctc_loss`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import rnn

from merakc.errors import RecordError
from merakc.frontend.record import record
from tests.frontend.against_eager import check, inputs_of, run_eager, run_graph, same
from tests.frontend.small import Small, linear, randn

LENGTHS = torch.tensor([6, 3, 5, 2])


def packed(s: Any, x: Tensor, lengths: Tensor) -> Tensor:
    y = s.layer(x)
    y = rnn.pack_padded_sequence(y, lengths, batch_first=True, enforce_sorted=False)
    y, last = s.recurrent(y)
    y, _ = rnn.pad_packed_sequence(y, batch_first=True, total_length=s.length)
    last = last[0] if isinstance(last, tuple) else last
    out: Tensor = y.pow(2).mean() + last.sum()
    return out


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("both", [False, True])
def test_packed_sequences(layer: Any, both: bool) -> None:
    torch.manual_seed(0)
    recurrent = layer(6, 5, 2, batch_first=True, bidirectional=both, dtype=torch.float64)
    model = Small(packed, layer=linear(), recurrent=recurrent)
    model.length = 6
    x = randn(4, 6, 6)
    reads = check(model, x, LENGTHS, relative=1e-12).reads
    assert reads is not None
    assert set(reads.answers) == {4}  # how many sequences there are


def test_other_lengths_run_on_the_same_graph() -> None:
    torch.manual_seed(0)
    model = Small(packed, layer=linear(), recurrent=nn.GRU(6, 5, batch_first=True).double())
    model.length = 6
    recording = record(model, (randn(4, 6, 6), LENGTHS), {})
    other = randn(4, 6, 6), torch.tensor([1, 4, 4, 2])
    assert recording.reads is not None
    assert not recording.reads.difference({"1": other[1]})
    found = run_graph(recording.graph, inputs_of(recording.graph, model, other, {}))
    same(found, run_eager(model, other, {}), model, 1e-12)


def test_the_longest_length_is_read_where_it_is_a_shape() -> None:
    torch.manual_seed(0)
    model = Small(packed, layer=linear(), recurrent=nn.GRU(6, 5, batch_first=True).double())
    model.length = None
    recording = check(model, randn(4, 8, 6), LENGTHS, relative=1e-12)
    assert recording.reads is not None
    assert recording.reads.difference({"1": LENGTHS - 1})
    assert not recording.reads.difference({"1": LENGTHS.flip(0)})


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ctc(joined: bool, reduction: str) -> None:
    torch.manual_seed(0)
    labels = torch.tensor([[1, 2, 3], [2, 2, -1], [4, -1, -1], [5, 1, -1]])

    def forward(s: Any, x: Tensor, labels: Tensor) -> Tensor:
        probabilities = s.layer(x).log_softmax(-1).transpose(0, 1)
        valid = labels >= 0
        targets = labels.masked_select(valid) if joined else labels.clamp(0)
        lengths = torch.full((4,), 9), valid.sum(-1)
        return F.ctc_loss(probabilities, targets, *lengths, reduction=reduction).sum()

    recording = check(Small(forward, layer=linear()), randn(4, 9, 6), labels, relative=1e-12)
    assert recording.reads is None


def test_dropout_between_packed_layers_is_refused() -> None:
    recurrent = nn.GRU(6, 5, 2, batch_first=True, dropout=0.5, dtype=torch.float64)
    model = Small(packed, layer=linear(), recurrent=recurrent)
    model.length = 6
    with pytest.raises(RecordError, match="dropout"):
        record(model, (randn(4, 6, 6), LENGTHS), {})
