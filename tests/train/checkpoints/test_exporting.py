"""What is exported is what other programs read."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import merakc
from benchmarks.ranks import run_ranks
from merakc.errors import CheckpointError, ConfigError
from merakc.machines.cluster import NOMINAL_CPU
from tests.battery.small_models import warm_up

CONFIG = transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, use_cache=False,
)  # fmt: skip
IDS = torch.arange(20).view(4, 5)
BATCH = {"input_ids": IDS, "labels": IDS}


def llama() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return transformers.LlamaForCausalLM(CONFIG)


def exported(folder: Path, options: dict[str, Any], layout: dict[str, Any]) -> str:
    """Exports, and tells what a user's own `save_pretrained` of parts says."""
    model = merakc.auto_parallel(llama(), BATCH, cluster=NOMINAL_CPU, **layout)
    merakc.export(folder / "out", model, **options)
    if "pp" not in layout:
        return ""
    assert (model.device, model.dtype) == (torch.device("cpu"), torch.float32)
    whole = model.full_state_dict()
    if model.rank == 0:
        model.save_pretrained(folder / "own", state_dict=whole)
    with pytest.raises(ConfigError) as told:
        model.save_pretrained(folder / "parts")
    return str(told.value)


@pytest.mark.parametrize(
    ("layout", "options", "dtype"),
    [
        ({"tp": 2, "pp": 2}, {"max_shard_bytes": 10_000}, torch.float32),
        ({"dp": 2, "state_shards": "zero-3"}, {"dtype": torch.bfloat16}, torch.bfloat16),
        ({"tp": 2, "precision": "bf16-mixed"}, {"dtype": torch.float64}, torch.float64),
    ],
    ids=str,
)
def test_from_pretrained_reads_it(
    layout: dict[str, Any], options: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    warm_up()
    for text in run_ranks(4 if "pp" in layout else 2, partial(exported, tmp_path, options, layout)):
        assert ("merakc.export(folder, model)" in text) == ("pp" in layout)
    read: Any = transformers.LlamaForCausalLM.from_pretrained
    model, told = read(tmp_path / "out", dtype="auto", output_loading_info=True)
    assert not any(told[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    wanted = llama().state_dict()
    for name, value in model.state_dict().items():
        assert value.dtype == dtype
        assert torch.equal(value, wanted[name].to(dtype)), name
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert (len(files) == 1) == ("dtype" in options)
    assert (tmp_path / "out" / "generation_config.json").exists()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == str(dtype).removeprefix("torch.")
    assert merakc.load(tmp_path / "out", model).step == 0
    if "pp" in layout:  # a user's own has been given whole weights
        own = read(tmp_path / "own").state_dict()
        for name, value in wanted.items():
            assert torch.equal(own[name], value), name


def test_a_plain_model_is_exported_too(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 3)
    assert merakc.export(tmp_path / "out", model) == tmp_path / "out"
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "checkpoint.json", "model.safetensors",
    ]  # fmt: skip
    other = torch.nn.Linear(2, 3)
    merakc.load(tmp_path / "out", other)
    assert torch.equal(other.weight, model.weight)
    for wrong in ({"dtype": torch.int8}, {"max_shard_bytes": 0}):
        with pytest.raises(CheckpointError, match=next(iter(wrong))):
            merakc.export(tmp_path / "out", model, **wrong)  # type: ignore[arg-type]
