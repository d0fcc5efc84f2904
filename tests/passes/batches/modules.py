"""Small modules in parts of a batch, compared with the whole batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from merakc.batches.split import sample_rows
from merakc.ir.batches import BatchLayout, BatchSplit
from merakc.lowering.recording import record_part
from merakc.passes.batches.proof.replay import replay
from merakc.passes.batches.recorded import in_parts

CPU = torch.device("cpu")


def parted(model: nn.Module, batch: Mapping[str, Tensor], parts: int) -> BatchSplit:
    """The step of a batch in equal parts."""
    (size, *_) = [len(t) for t in batch.values()]
    recording = record_part(model, (), batch, BatchLayout((size,), parts), CPU)
    return in_parts(recording, parts)


def compare(model: nn.Module, batch: Mapping[str, Tensor], parts: int) -> BatchSplit:
    """The step, once its loss and gradients are seen to be those of the whole batch."""
    split = parted(model, batch, parts)
    (size, *_) = [len(t) for t in batch.values()]
    weights = list(model.parameters())
    wanted = model(**batch)["loss"]
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    sizes = [size // parts] * parts
    found = replay([split] * parts, sizes, state, dict(batch), sample_rows((), batch))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    for got, want in zip(
        torch.autograd.grad(found, weights), torch.autograd.grad(wanted, weights), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    return split
