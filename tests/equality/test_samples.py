"""Weights and batches: the same for a seed, without zeros, with as many labels in each sample."""

from __future__ import annotations

import torch
import transformers

from merakc.equality.samples import IGNORED, drawn_batch, drawn_model
from merakc.sources import load_source, source_of
from tests.small_source import small


def test_weights_follow_from_the_seed_and_hide_nothing() -> None:
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8)
    source = source_of("gpt2", config, 4)
    one, same, other = (drawn_model(source, seed) for seed in (0, 0, 1))
    for (name, a), b, c in zip(
        one.named_parameters(), same.parameters(), other.parameters(), strict=True
    ):
        assert a.dtype == torch.float64
        assert torch.equal(a, b), name
        assert not torch.equal(a, c), name
        assert a.abs().min() > 0, name
    assert one.training


def test_every_sample_has_as_many_labels() -> None:
    source = load_source("gpt2", 16)
    batch = drawn_batch(source, 6, 3)
    assert torch.equal(batch["labels"], drawn_batch(source, 6, 3)["labels"])
    assert not torch.equal(batch["labels"], drawn_batch(source, 6, 4)["labels"])
    ignored = batch["labels"] == IGNORED
    assert ignored.sum(1).tolist() == [1] * 6
    assert not ignored[:, 0].any()
    assert int(batch["input_ids"].min()) >= 0
    assert int(batch["input_ids"].max()) < 50257


def test_images_and_sounds_are_noise() -> None:
    source = source_of("vit", transformers.ViTConfig(image_size=32, num_hidden_layers=1))
    batch = drawn_batch(source, 3, 0)
    assert batch["pixel_values"].dtype == torch.float64
    assert batch["pixel_values"].std() > 0.5
    assert batch["labels"].shape == (3,)


def test_a_functions_batch_is_repeated_from_another_sample_on() -> None:
    source = load_source("tests.small_source:small")
    model, _ = small()
    x = torch.arange(32.0).reshape(4, 8)
    given = type(source)(
        source.name, model, source.batch, example={"x": x, "scale": torch.ones(())}
    )
    found = drawn_batch(given, 6, 1)
    assert found["x"].dtype == torch.float64
    assert torch.equal(found["x"], x[[1, 2, 3, 0, 1, 2]].double())
    assert found["scale"].shape == ()
    drawn = drawn_model(given, 0)
    assert (drawn.first.weight - model.first.weight).abs().max() < 0.2
    assert model.first.weight.dtype == torch.float32, "the given model stays as it was"
