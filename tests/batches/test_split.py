from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from merakc.batches.split import (
    batch_size_of,
    call_arguments,
    named_tensors,
    resized,
    sample_rows,
    signature,
    split_batch,
    tensor_specs,
    with_tensor_specs,
)
from merakc.errors import ConfigError
from merakc.ir.batches import Rows


def test_call_arguments() -> None:
    x = torch.zeros(2)
    assert call_arguments({"x": x}) == ((), {"x": x})
    assert call_arguments([x, 3]) == ((x, 3), {})
    assert call_arguments((x,)) == ((x,), {})
    assert call_arguments(x) == ((x,), {})


def test_batch_size_is_the_commonest() -> None:
    batch = {"a": torch.zeros(4, 2), "mask": torch.zeros(9, 9), "b": torch.zeros(4), "n": 9}
    assert batch_size_of((), batch) == 4
    assert batch_size_of((torch.tensor(1.0), torch.zeros(3)), {}) == 3


@pytest.mark.parametrize("batch", [{}, {"x": "text"}, {"x": torch.tensor(1)}], ids=repr)
def test_batch_without_a_batch_dim(batch: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="holds no tensor with a batch dim"):
        batch_size_of((), batch)


def test_lists_of_tensors_of_unlike_lengths_hold_no_batch_dim() -> None:
    lists = {"boxes": [torch.zeros(n, 4) for n in (2, 3)]}
    with pytest.raises(ConfigError, match=r"unlike lengths \('boxes.0' of shape \[2, 4\]\); give"):
        batch_size_of((), lists)
    assert batch_size_of((), lists | {"labels": torch.zeros(2)}) == 2


def test_split_and_join() -> None:
    nested = {"x": torch.arange(12).view(6, 2), "more": {"y": torch.arange(6)}, "scale": 2.0}
    fixed = torch.zeros(7, 6)
    parts = split_batch((fixed,), nested, 3)
    assert [p[1]["scale"] for p in parts] == [2.0] * 3
    assert all(p[0][0] is fixed for p in parts)
    assert torch.equal(Rows().join([p[1]["x"] for p in parts]), nested["x"])
    assert torch.equal(parts[2][1]["more"]["y"], torch.tensor([4, 5]))


@pytest.mark.parametrize("parts", [0, -1, 4])
def test_split_that_does_not_divide(parts: int) -> None:
    with pytest.raises(ConfigError, match=rf"{parts} micro-batches.*\[1, 2, 3, 6\]"):
        split_batch((torch.zeros(6),), {}, parts)


def test_names_are_paths() -> None:
    x, y, z = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    named = named_tensors((x, [y]), {"target": {"boxes": z}, "n": 1})
    assert {name: len(t) for name, t in named.items()} == {"0": 1, "1.0": 2, "target.boxes": 3}


def test_signature_tells_shapes_dtypes_and_values_apart() -> None:
    x = torch.zeros(2, 3)
    base = signature((x,), {"flag": True})
    assert base == signature((torch.ones(2, 3),), {"flag": True})
    for other in (
        signature((x.T,), {"flag": True}),
        signature((x.double(),), {"flag": True}),
        signature((x,), {"flag": False}),
        signature((), {"x": x, "flag": True}),
    ):
        assert other != base


def test_specs_of_another_rank() -> None:
    mine = {"x": torch.zeros(2, 3), "y": torch.zeros(2, dtype=torch.long), "n": 5}
    theirs = {"x": torch.zeros(4, 7), "y": torch.zeros(4, dtype=torch.int), "n": 5}
    args, kwargs = with_tensor_specs((), mine, tensor_specs((), theirs))
    assert args == ()
    assert signature(args, kwargs) == signature((), theirs)
    assert kwargs["x"].is_meta
    with pytest.raises(ConfigError, match="holds 2 tensors, rank 0's 1"):
        with_tensor_specs((), mine, tensor_specs((), {"x": mine["x"]}))


class Pair(NamedTuple):
    left: torch.Tensor
    right: list[torch.Tensor]


def test_the_names_of_leaves() -> None:
    x = torch.zeros(2)
    found = named_tensors((x,), {"ids": x, "pair": Pair(x, [x]), "more": {"y": x}})
    assert list(found) == ["0", "ids", "pair.left", "pair.right.0", "more.y"]


def test_samples_by_name() -> None:
    batch = {"a": torch.arange(4), "mask": torch.zeros(9, 9), "more": {"b": torch.arange(4)}}
    rows = sample_rows((), {**batch, "scalar": torch.tensor(4)})
    assert rows == {"a": Rows(), "more.b": Rows()}


@pytest.mark.parametrize("samples", [1, 3, 8])
def test_the_batch_of_another_size(samples: int) -> None:
    """Only the tensors of samples change; those without values stay without."""
    views = torch.zeros(2, 12, dtype=torch.int32, device="meta")
    batch = {"a": torch.arange(4), "mask": torch.zeros(9, 9), "more": [views, 7]}
    rows = {"a": Rows(), "more.0": Rows(1, 1, 3)}
    args, now = resized((batch["mask"],), batch, rows, samples)
    assert args[0] is now["mask"] is batch["mask"]
    assert now["more"][1] == 7
    assert signature((), {"a": now["a"], "v": now["more"][0]}) == signature(
        (), {"a": torch.zeros(samples).long(), "v": torch.zeros(2, 3 * samples).int()}
    )
    assert now["a"].tolist() == [0, 1, 2, 3, 0, 1, 2, 3][:samples]
    assert now["more"][0].is_meta
