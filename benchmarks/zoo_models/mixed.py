"""Models of transformers with more than one kind of input, and those that hear."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn

from benchmarks.models import (
    BERT_DROPOUTS,
    CLASSES,
    EVEN_VOCABULARY,
    GROUPED,
    HIDDEN,
    IDS,
    IMAGE,
    SEQUENCE,
    SIZES,
    ModelCase,
    shifted,
    transformers_model,
    unshifted,
)
from benchmarks.plain_models import Around
from benchmarks.zoo_models.batches import (
    IMAGE_WORD,
    images_and_text,
    images_in_text,
    samples,
    sounds,
)

WAVE = 400  # samples: 39 frames after two convolutions


class Contrastive(Around):
    """A model of two towers, asked for its loss."""

    def forward(self, **batch: torch.Tensor) -> dict[str, torch.Tensor]:
        """The contrastive loss over the pairs of the batch."""
        return {"loss": self.inner(**batch, return_loss=True).loss}


TOWER: dict[str, Any] = {**SIZES, "num_hidden_layers": 2}  # two towers make four layers
TEXT: dict[str, Any] = {
    **TOWER, "vocab_size": EVEN_VOCABULARY, "max_position_embeddings": SEQUENCE, **IDS
}  # fmt: skip
VISION: dict[str, Any] = {**TOWER, "image_size": IMAGE, "patch_size": 8}
PAIRS = partial(images_and_text, EVEN_VOCABULARY, IMAGE, labels=False)
CAPTIONED = partial(images_and_text, EVEN_VOCABULARY, IMAGE, labels=True)
LLAMA: dict[str, Any] = {**TEXT, **GROUPED, "use_cache": False}


def _two_towers(name: str, **sizes: Any) -> Callable[[float], nn.Module]:
    """A model whose config is made of one for text and one for images."""

    def build(dropout: float) -> nn.Module:
        rates = {"attention_dropout": dropout}
        config = getattr(transformers, f"{name}Config")(
            text_config={**TEXT, **rates, **sizes}, vision_config={**VISION, **rates},
        )  # fmt: skip
        return Contrastive(getattr(transformers, f"{name}Model")(config))

    return build


def _blip(dropout: float) -> nn.Module:
    rates = dict.fromkeys(BERT_DROPOUTS, dropout)
    more = {"encoder_hidden_size": HIDDEN, "sep_token_id": 2, "use_cache": False}
    vision = {**VISION, "attention_dropout": dropout, "initializer_range": 0.02}
    config = transformers.BlipConfig(text_config={**TEXT, **rates, **more}, vision_config=vision)
    return transformers.BlipForConditionalGeneration(config)


def _llava(dropout: float) -> nn.Module:
    text = {**LLAMA, "model_type": "llama", "attention_dropout": dropout}
    vision = {**VISION, "model_type": "clip_vision_model", "attention_dropout": dropout}
    config = transformers.LlavaConfig(
        text_config=text, vision_config=vision, image_token_index=IMAGE_WORD, image_seq_length=4
    )
    return transformers.LlavaForConditionalGeneration(config)


# Masks drawn by numpy, and layers left out at random, would depend on the draw.
_SOUND: dict[str, Any] = {
    **SIZES, "conv_dim": [16, 16], "conv_stride": [5, 2], "conv_kernel": [10, 3],
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "classifier_proj_size": 16,
    "apply_spec_augment": False, "mask_time_prob": 0.0, "layerdrop": 0.0,
}  # fmt: skip
_SOUND_DROPOUTS = (
    "hidden_dropout", "activation_dropout", "attention_dropout", "feat_proj_dropout",
    "final_dropout",
)  # fmt: skip


def sound_model(class_name: str, **sizes: Any) -> Callable[[float], nn.Module]:
    """A model of waves."""
    return transformers_model(class_name, _SOUND_DROPOUTS, **_SOUND, **sizes)


def hearing(name: str, class_name: str, **sizes: Any) -> ModelCase:
    """A model that tells the class of a wave."""
    build = sound_model(f"{class_name}ForSequenceClassification", num_labels=CLASSES, **sizes)
    return ModelCase(name, build, partial(sounds, WAVE), unshifted)


MIXED = (
    ModelCase("clip", _two_towers("CLIP"), PAIRS, samples),
    ModelCase("siglip", _two_towers("Siglip", projection_size=HIDDEN), PAIRS, samples),
    ModelCase("blip", _blip, CAPTIONED, shifted),
    ModelCase("llava", _llava, images_in_text, shifted),
    hearing("wav2vec2", "Wav2Vec2"),
    hearing("hubert", "Hubert"),
)  # fmt: skip
