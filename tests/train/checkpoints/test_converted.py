"""Weights that transformers renames and packs: as `from_pretrained` reads them, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from merakc.errors import CheckpointError
from merakc.ir.boxes import Box
from merakc.train.checkpoints.weight_files import open_weights
from tests.battery.small_models import Tensors
from tests.train.checkpoints.test_weight_files import changed, meta, mixtral


def vision() -> Any:
    """A model whose checkpoints have other names."""
    config = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        image_size=8, patch_size=4,
    )  # fmt: skip
    return transformers.CLIPVisionModel(config)


@pytest.mark.parametrize("make", [mixtral, vision])
def test_as_from_pretrained(make: Callable[[], Any], tmp_path: Path) -> None:
    torch.manual_seed(3)
    make().save_pretrained(tmp_path)
    wanted = dict(type(make()).from_pretrained(tmp_path).named_parameters())
    files = open_weights(tmp_path, meta(make, torch.float32))
    assert any(e.key != name for name, e in files.tensors.items()) or any(
        e.made for e in files.tensors.values()
    )
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
