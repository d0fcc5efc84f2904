"""What a call asks of a gradient, as a number that ranks can add up."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from merakc.train.parameters.numbers import Kind, kind_of

VALUES = torch.tensor([[1.0, -3.0], [0.0, 2.0]], dtype=torch.float64)
# By call: its other arguments, how ranks' numbers are combined, and what is wanted of the whole.
CASES: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], Kind]] = {
    "2-norm": ("norm", (), {}, Kind("sum", 2.0)),
    "fro": ("norm", ("fro",), {}, Kind("sum", 2.0)),
    "3-norm": ("linalg_vector_norm", (3,), {}, Kind("sum", 3.0)),
    "named": ("linalg_vector_norm", (), {"ord": 1.0, "dim": None}, Kind("sum", 1.0)),
    "largest": ("norm", (float("inf"),), {}, Kind("max")),
    "smallest": ("norm", (-float("inf"),), {}, Kind("min")),
    "not zero": ("norm", (0,), {}, Kind("sum")),
    "sum": ("sum", (), {"dtype": torch.float64}, Kind("sum")),
    "mean": ("mean", (), {}, Kind("sum", divisor=4)),
    "any": ("any", (), {}, Kind("max")),
}
CALLS = {
    "norm": torch.norm, "linalg_vector_norm": torch.linalg.vector_norm, "sum": torch.sum,
    "mean": torch.mean, "any": torch.any,
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_number_of_a_whole_is_made_of_those_of_parts(name: str) -> None:
    call, rest, kwargs, kind = CASES[name]
    made = kind_of(call, VALUES, 4, rest, kwargs)
    assert made is not None
    assert made[0] == kind
    parts = torch.stack([made[1](row).double() for row in VALUES])
    joined = parts.sum() if kind.combine == "sum" else getattr(parts, kind.combine)()
    wanted = CALLS[call](VALUES, *rest, **kwargs)  # type: ignore[operator]
    assert kind.finish(joined).item() == pytest.approx(float(wanted), rel=1e-12)


@pytest.mark.parametrize(
    ("call", "rest", "kwargs"),
    [
        ("norm", (2, 0), {}), ("norm", ("nuc",), {}), ("linalg_norm", (1,), {}), ("sum", (0,), {}),
        ("max", (), {"dim": 0}), ("linalg_vector_norm", (2,), {"dim": (0,)}),
    ],
)  # fmt: skip
def test_numbers_of_some_dims_are_none(call: str, rest: Any, kwargs: Any) -> None:
    assert kind_of(call, VALUES, 4, rest, kwargs) is None
