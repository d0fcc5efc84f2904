"""Small models of the same structure, found without knowing any model."""

from __future__ import annotations

from typing import Any

import transformers

from merakc.equality.shrink import (
    MOST_NUMBERS,
    SEQUENCE,
    changed,
    changes,
    integers,
    shrink,
    structure,
)
from merakc.frontend.record import record
from merakc.planner.sources.source import Source, load_source, source_of


def _structure(source: Source) -> frozenset[tuple[str, frozenset[str]]]:
    return structure(record(source.model, (), source.batch(2), repeated=False).graph)


def test_a_preset_becomes_small_and_stays_what_it_is() -> None:
    source = load_source("llama-3-70b", 4096)
    told: list[str] = []
    found = shrink(source, 2, told.append)
    small = found[-1]
    assert small.numbers < 3 * MOST_NUMBERS, "every integer is small by then"
    assert found[0].source is source
    assert [s.numbers for s in found] == sorted((s.numbers for s in found), reverse=True)
    assert _structure(small.source) == _structure(source)
    assert told
    assert len(told) == len(found) - 1
    layers = [v for p, v in small.integers.items() if "layer" in str(p[-1:])]
    assert 4 in layers, "two stages, two layers each"
    lowered = changes(found[0], small)
    assert all(now < before for before, now in lowered.values())
    assert lowered["vocab_size"][1] >= 16
    assert small.source.config.max_position_embeddings >= small.source.sequence


def test_a_configuration_inside_a_configuration_is_lowered() -> None:
    config = transformers.WhisperConfig(
        encoder_layers=4, decoder_layers=4, d_model=192, encoder_attention_heads=6,
        decoder_attention_heads=6, encoder_ffn_dim=768, decoder_ffn_dim=768,
    )  # fmt: skip
    source = source_of("whisper", config, 64)
    small = shrink(source, 1)[-1]
    assert small.numbers < 3 * MOST_NUMBERS
    assert _structure(small.source) == _structure(source)


def test_alternating_layers_keep_a_layer_of_each_kind() -> None:
    config = transformers.Gemma2Config(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=12,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    source = source_of("gemma", config, 64)
    small = shrink(source, 2)[-1]
    assert small.source.config.num_hidden_layers == 4
    assert _structure(small.source) == _structure(source)


def test_a_small_model_keeps_its_widths() -> None:
    config = transformers.GPT2Config(
        n_layer=4, n_embd=32, n_head=4, n_inner=64, vocab_size=128, n_positions=16
    )
    (found,) = shrink(source_of("gpt2", config), 2)
    assert found.integers["n_embd",] == 32
    assert found.integers[SEQUENCE] == 16


def test_other_calls_are_another_structure() -> None:
    one, other = (
        source_of("llama", transformers.LlamaConfig(num_hidden_layers=1, num_key_value_heads=k), 8)
        for k in (32, 8)
    )
    assert _structure(one) != _structure(other), "copies of key heads are calls of their own"


def test_integers_and_how_they_are_changed() -> None:
    fields: dict[str, Any] = {
        "a": 4, "flag": True, "kinds": ["x", "y", "x", "y"], "depths": [3, 4], "names": {"0": 7},
        "inner": {"model_type": "m", "a": 4, "kinds": ["x"] * 4},
    }  # fmt: skip
    assert dict(integers(fields)) == {
        ("a",): 4, ("depths", 0): 3, ("depths", 1): 4, ("inner", "a"): 4
    }  # fmt: skip
    found = changed(fields, ("a",), 2, cut=True)
    assert (found["a"], found["kinds"], found["inner"]["kinds"]) == (2, ["x", "y"], ["x"] * 4)
    assert changed(fields, ("inner", "a"), 2, cut=False)["inner"]["kinds"] == ["x"] * 4
    assert changed(fields, ("depths", 1), 2, cut=True)["depths"] == [3, 2]
    assert (fields["a"], fields["depths"]) == (4, [3, 4])
