"""Weights and batches: the same for a seed, without zeros, with uneven labels and hooks kept."""

from __future__ import annotations

from dataclasses import replace

import torch
import transformers
from torch import nn

from merakc.equality.samples import drawn_batch, drawn_model
from merakc.planner.sources.config_batches import IGNORED
from merakc.planner.sources.source import Source, load_source, resized, source_of
from tests.small_source import small


def test_weights_follow_from_the_seed_and_hide_nothing() -> None:
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8)
    source = source_of("gpt2", config, 4)
    with (
        drawn_model(source, 0) as one,
        drawn_model(source, 0) as same,
        drawn_model(source, 1) as other,
    ):
        _check_drawn(one, same, other)


def _check_drawn(one: nn.Module, same: nn.Module, other: nn.Module) -> None:
    for (name, a), b, c in zip(
        one.named_parameters(), same.parameters(), other.parameters(), strict=True
    ):
        assert a.dtype == torch.float64
        assert torch.equal(a, b), name
        assert not torch.equal(a, c), name
        assert a.abs().min() > 0, name
    assert one.training


def test_labels_are_uneven_and_a_part_has_none() -> None:
    source = load_source("gpt2", 16)
    batch = drawn_batch(source, 12, 3, parts=4)
    assert torch.equal(batch["labels"], drawn_batch(source, 12, 3, parts=4)["labels"])
    assert not torch.equal(batch["labels"], drawn_batch(source, 12, 4, parts=4)["labels"])
    for seed in range(10):
        labels = drawn_batch(source, 12, seed, parts=4)["labels"]
        counts = (labels != IGNORED).sum(1)
        parts = counts.view(4, 3)
        assert 16 in counts
        assert any(part[:2].tolist() == [16, 0] for part in parts), counts
        assert (parts.sum(1) == 0).any()
        assert len(set(counts.tolist())) > 3
    assert set(batch) == {"input_ids", "labels"}
    assert int(batch["input_ids"].min()) >= 0
    assert int(batch["input_ids"].max()) < 50257
    alone = drawn_batch(source, 2, 0)["labels"]
    assert (alone != IGNORED).sum(1).tolist() == [16, 0]


def test_texts_are_padded_where_the_model_takes_a_mask() -> None:
    batch = drawn_batch(load_source("gpt2", 16), 12, 3, padded=True)
    lengths = batch["attention_mask"].sum(1)
    assert batch["attention_mask"].shape == (12, 16)
    assert len(set(lengths.tolist())) > 3
    assert lengths.min() >= 1
    image = source_of("vit", transformers.ViTConfig(image_size=32, num_hidden_layers=1))
    assert "attention_mask" not in drawn_batch(image, 4, 3, padded=True)


def test_images_and_sounds_are_noise() -> None:
    source = source_of("vit", transformers.ViTConfig(image_size=32, num_hidden_layers=1))
    batch = drawn_batch(source, 8, 0, parts=4)
    assert batch["pixel_values"].dtype == torch.float64
    assert batch["pixel_values"].std() > 0.5
    assert batch["labels"].shape == (8,)
    assert 0 < (batch["labels"] == IGNORED).sum() < 8


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
    start = {name: value.clone() for name, value in model.state_dict().items()}
    given = replace(given, model=model)
    with drawn_model(given, 0) as drawn:
        assert drawn.first.weight.dtype == torch.float64
        assert 0 < (drawn.first.weight - start["first.weight"]).abs().max() < 0.2
    for name, value in model.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, start[name]), "the given model stays as it was"


class Hooked(nn.Module):
    """Scaled by a parameter that only a hook, made in `__init__`, knows of."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.norm = nn.BatchNorm1d(8)
        self.up.register_forward_hook(lambda _, __, out: out * self.scale)

    def reset_parameters(self) -> None:
        """Asked for where it was made on the meta device."""
        nn.init.constant_(self.scale, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mean over the samples."""
        return self.norm(self.up(x)).square().mean()


def test_a_functions_model_is_itself_with_its_hooks() -> None:
    batch = {"x": torch.randn(4, 8)}
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = Hooked()
        source = Source("mine", model, lambda n: resized(batch, n), example=batch)
        with drawn_model(source, 0) as drawn:
            drawn(batch["x"].double()).backward()
            assert drawn is model
            assert drawn.scale.grad is not None
            assert drawn.norm.running_mean.dtype == torch.float64
            assert drawn.norm.num_batches_tracked.dtype == torch.int64
        assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {device}
        assert model.up.weight.dtype == model.norm.running_mean.dtype == torch.float32
