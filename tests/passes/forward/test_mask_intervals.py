"""What rows of masks see, told from vectors, beside the masks themselves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from merakc.frontend.record import record
from merakc.passes.autodiff.interpret import interpret
from merakc.passes.forward.constant_masks import _Masks

ROWS, COLUMNS = 5, 7
LOW = torch.finfo(torch.float32).min
Make = Callable[[Tensor, Tensor, Tensor], Tensor]
RUNS: dict[str, Make] = {
    "le": lambda r, c, b: c <= r,
    "exchanged": lambda r, c, b: r >= c,
    "lt": lambda r, c, b: c < r + 2,
    "gt": lambda r, c, b: c > r - 2,
    "eq": lambda r, c, b: c == r,
    "steps": lambda r, c, b: c // 2 <= r // 2,
    "chunks": lambda r, c, b: c // 3 == r // 3,
    "window": lambda r, c, b: (c <= r) & (c > r - 3),
    "never": lambda r, c, b: (c < r) & (c > r),
    "prefix": lambda r, c, b: (c <= r) | (c < 3),
    "beside": lambda r, c, b: (c < r) | (c == r),
    "or nothing": lambda r, c, b: (c == r) | (c > 100),
    "not": lambda r, c, b: ~(c <= r),
    "not never": lambda r, c, b: ~(c > r + 100),
    "not in half of the rows": lambda r, c, b: ~((c <= r) & (r < 3)),
    "padding": lambda r, c, b: (c <= r) & (c < 4),
    "rows": lambda r, c, b: (c < 100) & (r > 2),
    "mixed dtypes": lambda r, c, b: c.float() * 0.5 <= r,
    "mixed halves": lambda r, c, b: c.half() < r.float() + 0.5,
    "each sample": lambda r, c, b: (c <= r)[None, None] & (b >= 0),
    "same": lambda r, c, b: (c * 0 == r * 0) & (c <= r),
    "floats": lambda r, c, b: torch.where(c <= r, torch.zeros(()), LOW),
    "floats the other way": lambda r, c, b: torch.where(c > r, LOW, torch.zeros(())),
    "expanded": lambda r, c, b: (c <= r)[None, None].expand(3, 1, ROWS, COLUMNS),
}
OTHERS: dict[str, Make] = {
    "hole": lambda r, c, b: (c < r) | (c > r),
    "falling": lambda r, c, b: (6 - c) <= r,
    "ne": lambda r, c, b: c != r,
    "not a run": lambda r, c, b: (c <= r) & (c % 2 == 0),
    "not in a window": lambda r, c, b: ~((c <= r) & (c > r - 2)),
    "no number": lambda r, c, b: c <= torch.where(r == 1, float("nan"), r.float()),
    "no numbers": lambda r, c, b: torch.where(c == 2, float("nan"), c.float()) <= r,
    "product": lambda r, c, b: (c - r) < 2,
    "slope": lambda r, c, b: torch.where(c <= r, (c - r).float(), LOW),
    "half": lambda r, c, b: torch.where(c <= r, 0.5, LOW),
}


class Masks(nn.Module):
    def __init__(self, make: Make) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        batch = torch.arange(3)[:, None, None, None]
        return self.make(torch.arange(ROWS)[:, None], torch.arange(COLUMNS), batch)


@pytest.mark.parametrize("kind", [*RUNS, *OTHERS])
def test_runs_are_what_rows_see(kind: str) -> None:
    model = Masks((RUNS | OTHERS)[kind])
    x = torch.randn(3, 2)
    graph = record(model, (x,), {}).graph
    (out,) = graph.outputs
    found = _Masks(graph).runs.seen(out.ref)
    assert (found is not None) == (kind in RUNS)
    if found is None:
        return
    (mask,) = interpret(graph, {i.name: x for i in graph.inputs})
    seen = mask if mask.dtype == torch.bool else mask == 0
    columns = torch.arange(COLUMNS)
    own = (columns >= found.starts[:, None]) & (columns < found.ends[:, None])
    assert torch.equal(own.expand(ROWS, COLUMNS), seen.reshape(-1, ROWS, COLUMNS)[0])
    is_causal = torch.equal(
        seen.reshape(-1, ROWS, COLUMNS)[0], columns <= torch.arange(ROWS)[:, None]
    )
    kinds = {True: "none", False: "causal" if is_causal else ""}
    assert found.kind(ROWS) == kinds[bool(seen.all())]
