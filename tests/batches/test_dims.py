from __future__ import annotations

from typing import Any

import pytest
import torch

from merakc.batches.dims import ambiguous, check_batch_dims, hypotheses, parse_batch_dims
from merakc.batches.split import batch_size_of, sample_rows, split_batch
from merakc.errors import ConfigError
from merakc.ir.batches import Rows


def test_places_as_users_say_them() -> None:
    given = {"x": 1, "images": (0, 2), "pages": (0, None), "w": None}
    assert parse_batch_dims(given) == {
        "x": Rows(1), "images": Rows(0, 1, 2), "pages": Rows(0, 1, 0), "w": None,
    }  # fmt: skip
    assert parse_batch_dims(None) == {}


@pytest.mark.parametrize("value", [-1, True, "0", 1.0, (0, 0), (0, 1, 2), (None, 2), (-1, 2)])
def test_what_is_no_place(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"batch_dims\['x'\] is .*; give the dim"):
        parse_batch_dims({"x": value})


@pytest.mark.parametrize(
    ("dims", "problem"),
    [
        ({"z": 0}, r"batch_dims names 'z'; the batch's tensors are x, y, more.w"),
        ({"x": 3}, r"'x' stand in dim 3; it is of shape \[5, 8, 3\]"),
        ({"x": (0, 2)}, r"'x' holds 2 rows for each sample; .* 5 does not divide by 2"),
        (
            {"x": 0, "y": 0},
            r"5 in 'x' of shape \[5, 8, 3\], 8 in 'y' .*: batch_dims=\{'x': 0, 'y': 0\}",
        ),
        ({"x": (0, None), "y": 0}, r"'x' holds rows of 8 samples; it is of shape \[5, 8, 3\]"),
    ],
)
def test_places_that_do_not_fit_the_batch(dims: dict[str, Any], problem: str) -> None:
    batch = {"x": torch.zeros(5, 8, 3), "y": torch.zeros(8), "more": {"w": torch.zeros(4)}}
    with pytest.raises(ConfigError, match=problem):
        check_batch_dims((), batch, parse_batch_dims(dims))


def test_places_rule_where_sizes_would_say_otherwise() -> None:
    batch = {
        "x": torch.arange(40).view(5, 8), "y": torch.arange(5),
        "z": [torch.zeros(10), torch.ones(5)], "images": torch.arange(16),
    }  # fmt: skip
    dims = parse_batch_dims({"x": 1, "y": None, "z.*": None, "images": (0, None)})
    assert batch_size_of((), batch, dims) == 8
    assert sample_rows((), batch, dims) == {"x": Rows(1), "images": Rows(0, 1, 2)}
    (_, first), (_, second) = split_batch((), batch, 2, dims)
    assert torch.equal(first["x"], batch["x"][:, :4])
    assert torch.equal(second["images"], batch["images"][8:])
    assert first["y"] is batch["y"]


def readings(batch: dict[str, Any], dims: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    found = hypotheses((), batch, parse_batch_dims(dims))
    return [{n: None if r is None else (r.dim, r.inner) for n, r in h.items()} for h in found]


def test_time_first_comes_first_where_sizes_say_so() -> None:
    batch = {"x": torch.zeros(5, 8, 3), "y": torch.zeros(8)}
    assert readings(batch)[0] == {"x": (1, 1), "y": (0, 1)}
    same = {"x": torch.zeros(5, 8), "y": torch.zeros(5, 8)}
    assert readings(same)[0] == {"x": (1, 1), "y": (1, 1)}, "tensors of one kind go together"


def test_several_rows_and_chance() -> None:
    found = readings({"images": torch.zeros(16, 8), "ids": torch.zeros(8, 7)})
    assert found[:2] == [{"images": (1, 1), "ids": (0, 1)}, {"images": (0, 0), "ids": (0, 1)}]
    found = readings({"x": torch.zeros(8, 6), "w": torch.zeros(8)})
    assert {"x": (0, 1), "w": None} in found
    assert {"x": (0, 1), "w": (0, 1)} not in found, "which is the first reading of all"


def test_tensors_in_doubt_are_varied_however_many_others_there_are() -> None:
    others = {f"x{n}": torch.zeros(8, n) for n in range(2, 7)} | {"y": torch.zeros(8, 7, 7)}
    found = readings({**others, "images": torch.zeros(16, 5)})
    assert found[0] == {**dict.fromkeys(others, (0, 1)), "images": (0, 0)}


def test_what_is_said_holds() -> None:
    batch = {"x": torch.zeros(5, 8, 3), "y": torch.zeros(5, 8), "w": torch.zeros(8)}
    found = readings(batch, {"x": 1, "w": None})
    assert found
    assert all(h["x"] == (1, 1) and h["w"] is None for h in found)
    assert {"x": (1, 1), "w": None, "y": (1, 1)} in found


def test_lists_of_unlike_lengths_hold_no_samples() -> None:
    boxes = [torch.zeros(3, 4), torch.zeros(8, 4), *[torch.zeros(3, 4)] * 6]
    batch = {"x": torch.zeros(8, 6), "targets": [{"boxes": b} for b in boxes]}
    assert batch_size_of((), batch) == 8
    assert sample_rows((), batch) == {"x": Rows()}
    assert all(list(h) == ["x"] for h in readings(batch))
    levels = {"levels": [torch.zeros(4, 8), torch.zeros(4, 16)]}
    assert list(sample_rows((), levels)) == ["levels.0", "levels.1"]


def test_several_ways() -> None:
    error = ambiguous([{"x": Rows(1)}, {"x": Rows(0, 1, 0), "w": None}])
    assert "batch_dims={'x': 1} or batch_dims={'x': (0, None), 'w': None}" in str(error)
