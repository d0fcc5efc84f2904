"""Recordings of parts of batches, as tests ask for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from merakc.batches.split import batch_size_of, call_arguments
from merakc.ir.batches import BatchLayout
from merakc.lowering.recording import record_part
from merakc.passes.batches.recorded import BatchRecording


def recorded(
    model: nn.Module, batch: Any, parts: int = 1, *, dp: int = 1, divided: bool = False
) -> BatchRecording:
    """The first of so many parts of a dp rank's batch; all ranks have as many samples."""
    args, kwargs = call_arguments(batch)
    layout = BatchLayout((batch_size_of(args, kwargs),) * dp, parts)
    return record_part(model, args, kwargs, layout, torch.device("cpu"), divided=divided)


def one_of_several(model: nn.Module, batch: Any) -> BatchRecording:
    """The forward of a batch that is one part of several, whatever their number."""
    return recorded(model, batch, dp=2)
