"""Graphs written so that their samples can be seen: no copies, nothing joined that is empty."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from merakc.frontend.record import record
from merakc.passes.batches.normalise import COPIES, normalised
from tests.passes.batches.modules import compare

X = torch.randn(4, 6, dtype=torch.float64)


class Shifted(nn.Module):
    """Predicts what comes next, as causal language models do; joins with an empty tail."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """`x` [n, 6]."""
        y = self.linear(x)
        kept, rest = y[..., :6], y[..., 6:]
        y = torch.cat([kept, rest], -1)
        made, wanted = y[..., :-1].contiguous().view(-1), x[..., 1:].contiguous().view(-1)
        return {"loss": (made - wanted).pow(2).mean()}


@pytest.mark.parametrize("parts", [2, 4])
def test_parts_of_any_size_take_the_path_of_the_batch(parts: int) -> None:
    assert compare(Shifted(), {"x": X}, parts).head is None


class Detached(nn.Module):
    """A copy that ends a gradient, and windows of memory as it lies."""

    def __init__(self, windows: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, dtype=torch.float64))
        self.windows = windows

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """`x` [n, 6]."""
        y = x * self.weight
        with torch.no_grad():
            scale = y.clone()
        z = (y * scale.t().contiguous().reshape(-1, 6)).sum()
        if self.windows:
            z = z + y.as_strided((2, 3), (1, 1)).sum()
        return {"loss": z}


def _copies(windows: bool) -> int:
    graph = normalised(record(Detached(windows), (), {"x": X}).graph)
    return sum(n.op in COPIES for n in graph.nodes)


def test_copies_that_end_gradients_or_lie_in_memory_are_kept() -> None:
    assert _copies(windows=False) == 1
    assert _copies(windows=True) == 2
