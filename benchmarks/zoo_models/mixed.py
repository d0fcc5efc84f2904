"""Models of transformers with more than one kind of input, and those that hear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

from benchmarks.models import (
    CLASSES,
    EVEN_VOCABULARY,
    HEADS,
    HIDDEN,
    IMAGE,
    LAYERS,
    SEQUENCE,
    WIDE,
    ModelCase,
    shifted,
    transformers_model,
    unshifted,
)
from benchmarks.zoo_models.batches import (
    IMAGE_WORD,
    images_and_text,
    images_in_text,
    samples,
    sounds,
)

_WAVE = 400  # samples: 39 frames after two convolutions
_TOWER_LAYERS = 2  # two towers make four layers


class Contrastive(nn.Module):
    """A model of two towers, asked for its loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **batch: torch.Tensor) -> dict[str, torch.Tensor]:
        """The contrastive loss over the pairs of the batch."""
        return {"loss": self.inner(**batch, return_loss=True).loss}


_TOWER: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": _TOWER_LAYERS,
    "num_attention_heads": HEADS,
}
_TEXT: dict[str, Any] = {
    **_TOWER,
    "vocab_size": EVEN_VOCABULARY,
    "max_position_embeddings": SEQUENCE,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VISION: dict[str, Any] = {**_TOWER, "image_size": IMAGE, "patch_size": 8}


def _two_towers(name: str, dropouts: tuple[str, ...], **sizes: Any) -> Callable[..., nn.Module]:
    """A model whose config is made of one for text and one for images."""

    def build(dropout: float) -> nn.Module:
        rates = dict.fromkeys(dropouts, dropout)
        config = getattr(transformers, f"{name}Config")(
            text_config={**_TEXT, **rates, **sizes}, vision_config={**_VISION, **rates},
        )  # fmt: skip
        return Contrastive(getattr(transformers, f"{name}Model")(config))

    return build


def _blip(dropout: float) -> nn.Module:
    text = {
        **_TEXT,
        "encoder_hidden_size": HIDDEN,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
        "sep_token_id": 2,
        "use_cache": False,
    }
    vision = {**_VISION, "attention_dropout": dropout, "initializer_range": 0.02}
    config = transformers.BlipConfig(text_config=text, vision_config=vision)
    return transformers.BlipForConditionalGeneration(config)


def _llava(dropout: float) -> nn.Module:
    text = {
        **_TEXT,
        "model_type": "llama",
        "num_key_value_heads": HEADS // 2,
        "attention_dropout": dropout,
        "use_cache": False,
    }
    vision = {**_VISION, "model_type": "clip_vision_model", "attention_dropout": dropout}
    config = transformers.LlavaConfig(
        text_config=text, vision_config=vision, image_token_index=IMAGE_WORD, image_seq_length=4
    )
    return transformers.LlavaForConditionalGeneration(config)


_SOUND_DROPOUTS = (
    "hidden_dropout", "activation_dropout", "attention_dropout", "feat_proj_dropout",
    "final_dropout",
)  # fmt: skip


def _hearing(name: str, class_name: str, **sizes: Any) -> ModelCase:
    build = transformers_model(
        f"{class_name}ForSequenceClassification",
        f"{class_name}Config",
        _SOUND_DROPOUTS,
        hidden_size=HIDDEN,
        intermediate_size=WIDE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_labels=CLASSES,
        conv_dim=[16, 16],
        conv_stride=[5, 2],
        conv_kernel=[10, 3],
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=4,
        classifier_proj_size=16,
        # Masks drawn by numpy, and layers left out at random, would depend on the draw.
        apply_spec_augment=False,
        mask_time_prob=0.0,
        layerdrop=0.0,
        **sizes,
    )
    return ModelCase(name, build, sounds(_WAVE), unshifted)


MIXED = (
    ModelCase(
        "clip",
        _two_towers("CLIP", ("attention_dropout",)),
        images_and_text(EVEN_VOCABULARY, IMAGE, labels=False),
        samples,
    ),
    ModelCase(
        "siglip",
        _two_towers("Siglip", ("attention_dropout",), projection_size=HIDDEN),
        images_and_text(EVEN_VOCABULARY, IMAGE, labels=False),
        samples,
    ),
    ModelCase("blip", _blip, images_and_text(EVEN_VOCABULARY, IMAGE, labels=True), shifted),
    ModelCase("llava", _llava, images_in_text(EVEN_VOCABULARY, IMAGE), shifted),
    _hearing("wav2vec2", "Wav2Vec2"),
    _hearing("hubert", "Hubert"),
)  # fmt: skip
