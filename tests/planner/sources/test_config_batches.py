"""Every kind of configuration has a batch on which its model gives a loss that trains it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers as hf

from merakc.equality.samples import drawn_batch, drawn_model
from merakc.errors import ConfigError, MerakWarning
from merakc.planner.sources.source import Source, load_source

SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip
IMAGES: dict[str, Any] = SMALL | {"image_size": 32, "patch_size": 16}
WAVES: dict[str, Any] = SMALL | {
    "conv_dim": (8,) * 7, "vocab_size": 32, "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0, "ctc_zero_infinity": True,
}  # fmt: skip
LENGTH = 12
TEXT, IMAGE = (2, LENGTH), (2, 3, 32, 32)


def of(kind: str, config: str, **fields: Any) -> hf.PretrainedConfig:
    """A configuration that names its class."""
    found: hf.PretrainedConfig = getattr(hf, config)(architectures=[kind], **fields)
    return found


CASES = [
    (of("BertForNextSentencePrediction", "BertConfig", **SMALL), {"labels": (2,)}),
    (of("BertForMultipleChoice", "BertConfig", **SMALL), {"input_ids": (2, 4, LENGTH)}),
    (of("BertForSequenceClassification", "BertConfig", **SMALL), {"labels": (2,)}),
    (of("BertForSequenceClassification", "BertConfig", num_labels=1, **SMALL), {"labels": (2,)}),
    (
        of("BertForSequenceClassification", "BertConfig", num_labels=3,
           problem_type="multi_label_classification", **SMALL),
        {"labels": (2, 3)},
    ),
    (of("BertForTokenClassification", "BertConfig", **SMALL), {"labels": TEXT}),
    (of("BertForQuestionAnswering", "BertConfig", **SMALL), {"end_positions": (2,)}),
    (
        of("CLIPModel", "CLIPConfig", text_config=SMALL | {"max_position_embeddings": 9},
           vision_config=IMAGES),
        {"input_ids": (2, 9), "pixel_values": IMAGE},
    ),
    (of("ViTForMaskedImageModeling", "ViTConfig", **IMAGES), {"bool_masked_pos": (2, 4)}),
    (of("VideoMAEForVideoClassification", "VideoMAEConfig", num_frames=4, **IMAGES),
     {"pixel_values": (2, 4, 3, 32, 32)}),
    (
        of("SegformerForSemanticSegmentation", "SegformerConfig", hidden_sizes=[8] * 4,
           depths=[1] * 4, num_attention_heads=[1] * 4, decoder_hidden_size=8, image_size=[32, 64]),
        {"pixel_values": (2, 3, 32, 64), "labels": (2, 32, 64)},
    ),
    (of("ASTForAudioClassification", "ASTConfig", max_length=32, num_mel_bins=16, **SMALL),
     {"input_values": (2, 32, 16)}),
    (of("Wav2Vec2ForCTC", "Wav2Vec2Config", **WAVES), {"input_values": (2, 160_000)}),
]  # fmt: skip


def loaded(config: hf.PretrainedConfig, folder: Path) -> Source:
    """What is planned of the configuration's file."""
    config.save_pretrained(folder)
    return load_source(str(folder), LENGTH)


@pytest.mark.parametrize(("config", "shapes"), CASES, ids=lambda c: getattr(c, "model_type", ""))
def test_each_kind_of_model_trains_on_its_batch(
    config: hf.PretrainedConfig, shapes: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    source = loaded(config, tmp_path)
    assert config.architectures == [type(source.model).__name__]
    zeros = source.batch(2)
    assert {name: tuple(zeros[name].shape) for name in shapes} == shapes
    batch = drawn_batch(source, 2, seed=0)
    with drawn_model(source, seed=0) as model:
        loss = model(**batch).loss
        loss.backward()
        assert loss.isfinite()
        assert any(p.grad is not None and p.grad.any() for p in model.parameters())
    for name, values in source.bounds.items():
        assert int(batch[name][batch[name] != source.ignored].max()) < values
        assert batch[name].dtype == zeros[name].dtype


@pytest.mark.parametrize(
    ("config", "planned", "why"),
    [
        (of("BertModel", "BertConfig", **SMALL), "BertForMaskedLM", "it takes no labels"),
        (of("ViTModel", "ViTConfig", **IMAGES), "ViTForImageClassification", "it takes no labels"),
        (
            of("T5WithLMHeadModel", "T5Config", d_model=32, num_layers=1),
            "T5ForConditionalGeneration",
            "transformers has no such class",
        ),
        (
            of("LlavaForConditionalGeneration", "LlavaConfig",
               text_config=SMALL | {"model_type": "llama"},
               vision_config=IMAGES | {"model_type": "clip_vision_model"}),
            "LlamaForCausalLM",
            "the part of LlavaForConditionalGeneration that reads texts, alone",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_is_planned_in_place_of_a_class_is_said(
    config: hf.PretrainedConfig, planned: str, why: str, tmp_path: Path
) -> None:
    with pytest.warns(MerakWarning, match=f"this plans {planned}.*{why}"):
        source = loaded(config, tmp_path)
    assert type(source.model).__name__ == planned


def test_a_loss_of_unknown_labels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="knows no batch for BertForPreTraining; give MODULE"):
        loaded(of("BertForPreTraining", "BertConfig", **SMALL), tmp_path)


def test_a_batch_that_the_model_does_not_take_is_refused(tmp_path: Path) -> None:
    """transformers' table has it for answers in texts; its answers are classes."""
    with pytest.raises(ConfigError, match="forward takes no end_positions, start_positions"):
        loaded(of("LxmertForQuestionAnswering", "LxmertConfig"), tmp_path)
