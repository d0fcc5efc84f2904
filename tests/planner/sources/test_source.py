"""Models to plan for: presets, configurations and functions, and what is none of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from merakc.equality.samples import drawn_batch
from merakc.errors import ConfigError, MerakWarning
from merakc.ir.batches import Rows
from merakc.planner.sources.source import PRESETS, load_source, resized

# From the reports that describe them, in billions.
PUBLISHED = {
    "gpt2": 0.124, "gpt2-xl": 1.56, "gpt3-175b": 175, "llama-3-8b": 8.03, "llama-3-70b": 70.6,
    "t5-11b": 11.3,
}  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_published_parameters_and_no_weights(name: str) -> None:
    source = load_source(name, 16)
    count = sum(p.numel() for p in source.model.parameters()) / 1e9
    assert count == pytest.approx(PUBLISHED[name], rel=0.005)
    assert all(p.is_meta for p in source.model.parameters())
    assert source.batch(3)["input_ids"].shape == (3, 16)


@pytest.mark.parametrize(
    ("config", "kind", "shapes"),
    [
        (transformers.BertConfig(), "BertForMaskedLM", {"input_ids": (2, 512)}),
        (transformers.T5Config(), "T5ForConditionalGeneration", {"labels": (2, 512)}),
        (
            transformers.WhisperConfig(),
            "WhisperForConditionalGeneration",
            {"input_features": (2, 80, 3000), "labels": (2, 448)},
        ),
        (transformers.ResNetConfig(), "ResNetForImageClassification", {"labels": (2,)}),
    ],
)
def test_config_files(
    tmp_path: Path,
    config: transformers.PretrainedConfig,
    kind: str,
    shapes: dict[str, tuple[int, ...]],
) -> None:
    config.save_pretrained(tmp_path)
    for given in (tmp_path, tmp_path / "config.json"):
        source = load_source(str(given))
        assert type(source.model).__name__ == kind
        batch = source.batch(2)
        assert {name: tuple(batch[name].shape) for name in shapes} == shapes


def test_the_architecture_that_a_config_names(tmp_path: Path) -> None:
    config = transformers.BertConfig(architectures=["BertLMHeadModel"], is_decoder=True)
    config.save_pretrained(tmp_path)
    assert type(load_source(str(tmp_path)).model).__name__ == "BertLMHeadModel"


def test_functions() -> None:
    source = load_source("tests.small_source:small")
    assert {k: tuple(v.shape) for k, v in source.batch(7).items()} == {"x": (7, 8), "scale": ()}
    (x,) = resized((torch.ones(4, 2),), 3)
    assert x.shape == (3, 2)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("llama-9", "'llama-9' is no preset .*llama-3-8b.* no config.json"),
        ("Llama-3-8", r"no config.json and no folder with one \(did you mean 'llama-3-8b'\?\); or"),
        ("tests", "tests: this folder has no config.json; give one that has"),
        ("no.such:thing", "No module named 'no'"),
        ("tests.small_source:missing", "has no function 'missing'"),
        ("tests.small_source:", "names no function"),
        (":small", "names no module"),
        (
            "tests.small_source:fails",
            r"small_source:fails\(\) fails: KeyError: 'width', at .*:\d+;",
        ),
        ("tests.small_source:four", "gave no model and batch, but 4 values"),
        ("lost.json", "there is no such file"),
        ("tests.small_source:no_model", "gave int for a model"),
        ("tests.small_source:nothing", "gave no model and batch"),
        ("tests.small_source:numbered", "gave batch_dims that are int"),
    ],
)
def test_what_is_no_source(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_source(text)


def test_lengths_of_texts_are_those_of_a_functions_batch() -> None:
    with pytest.raises(ConfigError, match="--seq 8: texts are as long as in the batch"):
        load_source("tests.small_source:small", 8)


def test_a_function_says_where_samples_stand() -> None:
    source = load_source("tests.small_source:time_first")
    assert source.dims == {"x": Rows(1)}
    assert source.batch(6)["x"].shape == (5, 6, 6)
    assert drawn_batch(source, 3, 1)["x"].shape == (5, 3, 6)


@pytest.mark.parametrize("text", ["raise RuntimeError('no GPU')", "def model(:", "exit(3)"])
def test_a_module_that_cannot_be_imported(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"broken:model: importing it fails: .*; give MODULE"):
        load_source("broken:model")


def test_a_file_that_is_no_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no such"}')
    with pytest.raises(ConfigError, match="no config of transformers'"):
        load_source(str(tmp_path))


def gpt2(folder: Path, **fields: object) -> str:
    path = folder / "small.json"
    small = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 32}
    path.write_text(json.dumps({**small, **fields}))
    return str(path)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"n_embd": 65}, "GPT2LMHeadModel cannot be made of this config: ValueError: .*divisible"),
        ({"n_embd": "wide"}, "no config of transformers': "),
    ],
)
def test_a_config_of_which_no_model_can_be_made(
    fields: dict[str, object], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_source(gpt2(tmp_path, **fields))


def test_texts_that_are_longer_than_the_config_says_are_warned_of(tmp_path: Path) -> None:
    with pytest.warns(MerakWarning, match="texts of 64 tokens .* n_positions, 32"):
        load_source(gpt2(tmp_path), 64)
    assert load_source(gpt2(tmp_path), 32).sequence == 32
