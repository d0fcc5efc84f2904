"""In-place calls and the calls that compute the same value."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from merakc.frontend.calls.writes import functional, without_out, written

ATEN = torch.ops.aten


@pytest.mark.parametrize(
    ("op", "wanted"),
    [
        (ATEN.add_.Tensor, ATEN.add.Tensor),
        (ATEN.add.out, ATEN.add.Tensor),
        (ATEN.masked_fill_.Scalar, ATEN.masked_fill.Scalar),
        (ATEN.index_put_.default, ATEN.index_put.default),
        (ATEN.relu_.default, ATEN.relu.default),
        (ATEN.t_.default, ATEN.t.default),
        (ATEN.resize_.default, None),
        (ATEN.set_.source_Tensor, None),
    ],
)
def test_functional_forms(op: Any, wanted: Any) -> None:
    assert functional(op) is wanted


def test_what_a_call_writes() -> None:
    x, y = torch.ones(2), torch.zeros(2)
    assert written(ATEN.add_.Tensor, (x, y), {}) == [x]
    assert written(ATEN.add.Tensor, (x, y), {}) == []
    (out,) = written(ATEN.add.out, (x, x), {"out": y})
    assert out is y
    assert without_out(ATEN.add.out, {"out": y, "alpha": 2}) == {"alpha": 2}
