"""Recordings of parts, and the steps that are made of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from merakc.errors import ConfigError
from merakc.frontend.record import record
from merakc.ir.batches import PER_MICRO_BATCH, WHOLE_BATCH, BatchLayout, Rows
from merakc.ir.graph import OutputKind
from merakc.lowering.recording import record_part
from merakc.passes.batches.recorded import (
    BatchRecording,
    couplings_of,
    in_parts,
    rows_of,
    with_outputs,
)
from tests.recorded import one_of_several, recorded

BATCH = {"x": torch.zeros(8, 4).double(), "weight": torch.ones(8).double(), "fixed": torch.ones(4)}


class Weighed(nn.Module):
    """A weighed loss, a result, and layers of their own for each."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.shown = nn.Linear(4, 3).double(), nn.Linear(4, 2).double()

    def forward(self, x: Tensor, weight: Tensor, fixed: Tensor) -> dict[str, Tensor]:
        loss = (self.layer(x * fixed).sum(1) * weight).sum() / weight.sum()
        return {"loss": loss, "logits": self.shown(x)}


def test_a_batch_of_one_part_is_as_it_was_recorded() -> None:
    plain = record(Weighed(), (), BATCH)
    whole = in_parts(plain, 1)
    assert whole.known is whole.head is None
    assert whole.graph == plain.graph
    only = in_parts(plain, 1, (OutputKind.LOSS,))
    assert [o.name for o in only.graph.outputs] == ["loss"]
    assert "shown" not in str(only.graph)
    assert couplings_of(plain) == WHOLE_BATCH
    assert rows_of(plain, whole) == {}


def test_a_recording_of_one_part_is_in_no_parts() -> None:
    with pytest.raises(ConfigError, match="of Weighed was recorded for a batch that is one part"):
        in_parts(record(Weighed(), (), BATCH), 4)


@pytest.mark.parametrize("parts", [2, 4])
def test_a_part_reads_its_rows_and_what_is_known(parts: int) -> None:
    recording = recorded(Weighed(), BATCH, parts)
    step = in_parts(recording, parts, (OutputKind.LOSS,))
    rows = rows_of(recording, step)
    assert rows.pop("x") == rows.pop("weight") == Rows()
    assert list(rows.values()) == [None], "the sum of the weights"
    assert recording.found is not None
    assert recording.found.share == 1 / parts


def test_one_part_that_is_to_be_divided_is_written_as_parts_are() -> None:
    """So that graphs of its own parts can stand in its place."""
    step = in_parts(recorded(Weighed(), BATCH, divided=True), 1, (OutputKind.LOSS,))
    assert step.known is not None
    part = in_parts(recorded(Weighed(), BATCH, 2), 2, (OutputKind.LOSS,))
    assert [i.target for i in step.graph.inputs] == [i.target for i in part.graph.inputs]


def test_one_of_several_serves_for_any_number_of_parts() -> None:
    recording = one_of_several(Weighed(), BATCH)
    graphs = [in_parts(recording, parts).graph for parts in (2, 3, 16)]
    assert graphs[0] == graphs[1] == graphs[2]
    assert in_parts(recording, 1).graph == recording.graph


def test_couplings_are_those_that_were_asked_for() -> None:
    layout = BatchLayout((8,), 2)
    made = record_part(Weighed(), (), BATCH, layout, torch.device("cpu"), couplings=PER_MICRO_BATCH)
    assert isinstance(made, BatchRecording)
    assert couplings_of(made) == PER_MICRO_BATCH


def test_outputs_take_what_they_need_along() -> None:
    graph = record(Weighed(), (), BATCH).graph
    (logits,) = [o for o in graph.outputs if o.name == "logits"]
    kept = with_outputs(graph, (logits,))
    kept.verify()
    assert sorted(i.target for i in kept.inputs) == ["shown.bias", "shown.weight", "x"]
