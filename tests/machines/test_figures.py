"""Figures in another unit than that of their name are none that a machine has."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from merakc.machines.figures import BytesPerS, FlopsPerS, Latency


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        (FlopsPerS, 5e9, 989.0),  # TFLOP/s
        (BytesPerS, 1.25e5, 3350.0),  # GB/s; right is a link of 1 Mb/s
        (Latency, 1e-5, 10.0),  # microseconds
    ],
)
def test_other_units_are_refused(kind: Any, right: float, wrong: float) -> None:
    adapter = TypeAdapter(kind)
    assert adapter.validate_python(right) == right
    with pytest.raises(ValidationError, match="Input should be"):
        adapter.validate_python(wrong)
