"""A part of a tensor is copied, moved, pickled, compared and computed with element by element."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from merakc.errors import ConfigError
from merakc.ir.layout import parse_layout
from merakc.runtime.part import Place, TensorPart, local_of, place_of, places, tagged

PLACE = Place("w", parse_layout("2 x 6*"), 2, 1, 1, 6)
WHOLE = torch.arange(12.0).reshape(2, 6)


def made() -> TensorPart:
    return TensorPart(PLACE.take(WHOLE).clone(), PLACE)


def pickled(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)  # with weights_only, as it is by default


@pytest.mark.parametrize(
    "same",
    [pickled, copy.deepcopy, torch.clone, torch.Tensor.detach, torch.Tensor.cpu, torch.Tensor.to],
)
def test_copies_are_the_same_part(same: Callable[[Any], Any]) -> None:
    args = (torch.float32,) if same is torch.Tensor.to else ()
    part, found = made(), same(made(), *args)
    assert (found.place, found.shape, found.dtype) == (PLACE, (2, 6), torch.float32)
    assert torch.equal(found, part)
    assert torch.equal(found.to_local(), torch.tensor([4.0, 5, 9, 10, 11]))


def test_dtype_and_values_change() -> None:
    part = made().to(torch.float64)
    assert part.dtype == part.local.dtype == torch.float64
    part.copy_(torch.zeros_like(made()))
    assert not part.local.any()


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("add", lambda p: p + WHOLE),
        ("add_", lambda p: torch.zeros(2, 6).add_(p)),
        ("add", lambda p: torch.add(p, 1, out=torch.zeros(2, 6))),
        ("add", lambda p: p + TensorPart(p.local.view(1, 5), PLACE)),
        ("sum", lambda p: p.sum()),
        ("bernoulli", torch.bernoulli),
        ("copy_", lambda p: torch.zeros(2, 6).copy_(p)),
        ("stack", lambda p: torch.stack([p, p])),
        ("copy_", lambda p: p.copy_(WHOLE)),
    ],
)
def test_a_part_is_not_taken_for_the_whole(name: str, use: Callable[[Any], Any]) -> None:
    message = rf"torch.{name} is called on a part of 'w', of which this rank holds 5 of 12"
    with pytest.raises(ConfigError, match=message):
        use(made())


def test_safetensors_writes_no_part_for_the_whole(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the memory of a part of 'w'.*full_state_dict\(\)"):
        save_file({"w": made()}, tmp_path / "w.safetensors")


def test_all_elements_are_not_there() -> None:
    reads: list[Callable[[Any], Any]] = [np.asarray, lambda x: x.numpy(), lambda x: x.tolist()]
    for read in reads:
        with pytest.raises(ConfigError, match="all elements are read of a part of 'w'"):
            read(made())


def test_averages() -> None:
    average, given, own = made(), made(), PLACE.take(WHOLE)
    average.mul_(0.9).add_(given + 1, alpha=0.1)
    average.lerp_(given, torch.tensor(0.5))
    average.add_(torch.where(given > 5, given, 0.0))
    assert average.place == PLACE
    torch.testing.assert_close(average.local, own + 0.05 + torch.where(own > 5, own, 0.0))


@pytest.mark.parametrize("use", [torch.Tensor.copy_, torch.Tensor.add_, torch.mul])
def test_other_ranks_parts_are_refused(use: Callable[[Any, Any], Any]) -> None:
    other = TensorPart(torch.zeros(5), replace(PLACE, tp_rank=0))
    with pytest.raises(ConfigError, match="saved by another rank or under another plan"):
        use(made(), other)


def test_what_a_parameter_takes() -> None:
    own, plain = torch.nn.Parameter(torch.zeros(1, 5)), torch.zeros(2, 6)
    places[own] = PLACE
    assert torch.equal(local_of(own, WHOLE), PLACE.take(WHOLE).view(1, 5))
    part = tagged(own)
    assert isinstance(part, TensorPart)
    assert local_of(own, part) is part.local
    kept = tagged(plain)
    assert type(kept) is torch.Tensor
    assert kept.data_ptr() == plain.data_ptr()
    assert place_of(plain) is None
    with pytest.raises(ConfigError, match=r"'w' is given as \(1, 5\), and the whole is \(2, 6\)"):
        local_of(own, torch.zeros(1, 5))
    with pytest.raises(ConfigError, match="this rank holds all of it"):
        local_of(plain, part)


def test_what_torchs_checkpoint_asks() -> None:
    part = made()
    chunks = part.__create_chunk_list__()
    assert [(tuple(c.offsets), tuple(c.sizes)) for c in chunks] == [
        ((0, 4), (1, 2)), ((1, 3), (1, 3)),
    ]  # fmt: skip
    for item in part.__create_write_items__("w", part):
        assert item.tensor_data is not None
        box = part.__get_tensor_shard__(item.index)
        (row, first), (_, count) = item.tensor_data.chunk.offsets, item.tensor_data.chunk.sizes
        assert torch.equal(box[0], WHOLE[row, first : first + count])
    silent = TensorPart(part.local, replace(PLACE, writes=False))
    assert silent.__create_write_items__("w", silent) == []
