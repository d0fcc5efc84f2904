"""Configurations of which no model can be made are refused before the work."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from merakc.errors import ConfigError
from merakc.planner.sources.config_checks import check_buffers, check_config
from merakc.planner.sources.source import load_source

LLAMA = {
    "model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 8,
}  # fmt: skip


def load(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**LLAMA, **fields}))
    load_source(str(path))


def test_a_sound_configuration_is_read(tmp_path: Path) -> None:
    load(tmp_path)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000; at most 2000"),
        ({"num_hidden_layers": 3000}, "num_hidden_layers is 3000; at most 2000"),
        ({"num_hidden_layers": 1800}, "more than 30000 modules and parameters"),
        ({"num_hidden_layers": 0}, "layers has no layers: numbers of layers must be 1 or more"),
        ({"num_hidden_layers": -1}, "no layers|config"),
        ({"rope_theta": float("nan")}, "NaN stands where a number must"),
        ({"vocab_size": 0}, "sizes must be 1 or more|cannot be made"),
        ({"hidden_size": -16}, "cannot be made of this config"),
        ({"max_position_embeddings": 10**12}, "a sample's input_ids is 1 x 1000000000000"),
        ({"max_position_embeddings": "x"}, "config"),
        ({"attn_implementation": "someone/kernel"}, "a kernel from the hub; give --trust"),
        ({"_attn_implementation": {"": "someone/kernel"}}, "a kernel from the hub"),
        (
            {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}},
            "it has code of its own; give --trust-remote-code",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_second(
    fields: dict[str, Any], why: str, tmp_path: Path
) -> None:
    load(tmp_path)  # the imports
    begun_s = time.process_time()
    with pytest.raises(ConfigError, match=why):
        load(tmp_path, **fields)
    assert time.process_time() - begun_s < 6  # one second alone, and tests share cores


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA)[:-1] + ', "hidden_size": 32}')
    with pytest.raises(ConfigError, match="'hidden_size' stands there twice"):
        load_source(str(path))


class Rotary(nn.Module):
    """Frequencies of a base, and a mask; `wide` numbers that must take no memory."""

    def __init__(self, base: float, wide: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(wide, wide))
        self.register_buffer("frequencies", 1.0 / base ** (torch.arange(0, 8, 2) / 8))
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))
        self.register_buffer("positions", torch.arange(wide).float())


def test_buffers_that_are_computed_of_a_number_that_cannot_be() -> None:
    check_buffers(lambda: Rotary(1e4))
    check_buffers(lambda: Rotary(1e4, 10**12))
    for base in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=r"buffer frequencies is not finite: .* rope_theta"):
            check_buffers(lambda base=base: Rotary(base))


def test_configurations_whose_fields_do_not_go_together() -> None:
    check_config(SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, architectures=["A"]))
    check_config(SimpleNamespace(num_attention_heads=4, num_key_value_heads=None))
    with pytest.raises(ValueError, match="num_key_value_heads is 3, which does not divide 4"):
        check_config(SimpleNamespace(num_attention_heads=4, num_key_value_heads=3))
    with pytest.raises(ValueError, match="architectures is 7: give a list of names"):
        check_config(SimpleNamespace(architectures=7))
