"""Batch norms by parts: the whole batch at once is the parts one after the other."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from merakc.equality.batch_norms import norms_by_parts
from merakc.ir.batches import Rows

PARTS, WRITING, SAMPLES, TIMES = 4, 2, 12, 3


class Twice(nn.Module):
    """One norm of two views of the samples; with time first, samples stand inside of it."""

    def __init__(self, *, momentum: float | None, times_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm = nn.Linear(5, 4), nn.BatchNorm1d(4, momentum=momentum)
        self.times_first = times_first

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The mean over samples, so that those of equal parts average to it."""
        found = []
        for view in (x, y):
            rows = view.transpose(0, 1) if self.times_first else view
            normed = self.norm(self.up(rows).flatten(0, 1)).unflatten(0, rows.shape[:2])
            found.append(normed)
        return (found[0] * found[1].tanh()).square().mean()


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("times_first", [False, True])
def test_the_batch_at_once_is_its_parts(momentum: float | None, times_first: bool) -> None:
    model = Twice(momentum=momentum, times_first=times_first).double()
    x, y = torch.randn(2, SAMPLES, TIMES, 5).double()
    plain = copy.deepcopy(model)
    for k, (a, b) in enumerate(zip(x.chunk(PARTS), y.chunk(PARTS), strict=True)):
        kept = {name: buffer.clone() for name, buffer in plain.named_buffers()}
        (plain(a, b) / PARTS).backward()
        if k >= WRITING:
            plain.norm.load_state_dict({n.removeprefix("norm."): b for n, b in kept.items()}, False)
    rows = Rows(0, TIMES, 1) if times_first else Rows(0, 1, TIMES)
    with norms_by_parts(model, {"norm": rows}, PARTS, WRITING):
        model(x, y).backward()
    for (name, own), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, wanted.grad, msg=name)
    assert model.norm.num_batches_tracked == 2 * WRITING
    for (name, own), wanted in zip(model.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(own, wanted, msg=name)
    assert "forward" not in vars(model.norm), "the model is left as it was"
    assert not model._forward_hooks
