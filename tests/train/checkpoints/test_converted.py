"""Weights that transformers renames and packs: as `from_pretrained` reads them, or refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from merakc.errors import CheckpointError
from merakc.ir.boxes import Box
from merakc.train.checkpoints.weight_files import open_weights
from tests.battery.small_models import Tensors
from tests.train.checkpoints.test_weight_files import changed, meta, mixtral


def test_experts_as_from_pretrained(tmp_path: Path) -> None:
    torch.manual_seed(3)
    plain = mixtral()
    plain.save_pretrained(tmp_path)
    wanted = dict(type(plain).from_pretrained(tmp_path).named_parameters())
    files = open_weights(tmp_path, meta(mixtral, torch.float32))
    assert sum(e.made is not None for e in files.tensors.values()) == 4
    for name, read in files.read():
        none = (0,) * wanted[name].dim()
        found = torch.cat([r.clone() for r in read(Box(none, tuple(wanted[name].shape), none))])
        assert torch.equal(found, wanted.pop(name)), name
    assert not wanted


def test_experts_that_do_not_make_a_tensor_are_refused(tmp_path: Path) -> None:
    torch.manual_seed(3)
    mixtral().save_pretrained(tmp_path)
    name = "model.layers.1.block_sparse_moe.experts.{}.w2.weight"
    made = "model.layers.1.mlp.experts.down_proj"
    cases: list[tuple[Callable[[Tensors], object], str]] = [
        (lambda t: t.pop(name.format(11)), rf"'{made}' is \[11, 32, 48\], and"),
        (lambda t: t.update({name.format(3): torch.zeros(2)}), f"'{made}' of the model cannot be"),
        (lambda t: [t.pop(name.format(k)) for k in range(12)], f"no tensor for .*'{made}'"),
    ]
    for change, message in cases:
        with pytest.raises(CheckpointError, match=message):
            open_weights(changed(tmp_path, change), meta(mixtral))


def test_a_library_that_does_not_say_how_it_converts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixtral().save_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers.conversion_mapping", None)
    with pytest.raises(CheckpointError, match="does not say how it converts"):
        open_weights(tmp_path, meta(mixtral))
