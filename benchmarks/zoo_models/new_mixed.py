"""Models of transformers that see, hear and read, and those that forecast."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode

from benchmarks.models import (
    BERT_DROPOUTS,
    CLASSES,
    EVEN_VOCABULARY,
    HEADS,
    HIDDEN,
    IDS,
    IMAGE,
    LAYERS,
    SEQ2SEQ_DROPOUTS,
    SEQUENCE,
    WIDE,
    Batch,
    ModelCase,
    shifted,
    transformers_model,
)
from benchmarks.plain_models import Around
from benchmarks.zoo_models.batches import (
    IMAGE_WORD,
    PATCHES,
    images_and_text,
    images_in_text,
    samples,
)
from benchmarks.zoo_models.mixed import (
    LLAMA,
    PAIRS,
    TEXT,
    TOWER,
    VISION,
    WAVE,
    Contrastive,
    hearing,
    sound_model,
)

_LABELS = 4  # of a sound's 39 frames
_CONTEXT, _AHEAD, _LAGS = 12, 4, [1, 2, 3]


def _spoken(batch_size: int, generator: torch.Generator) -> Batch:
    """Waves, and the letters spoken, of which samples have unequal numbers."""
    letters = torch.randint(1, EVEN_VOCABULARY, (batch_size, _LABELS), generator=generator)
    lengths = torch.randint(2, _LABELS + 1, (batch_size, 1), generator=generator)
    return {
        "input_values": torch.randn(batch_size, WAVE, generator=generator),
        "labels": letters.masked_fill(torch.arange(_LABELS) >= lengths, -100),
    }


def _letters(name: str, class_name: str, **sizes: Any) -> ModelCase:
    """A model that is trained on alignments of letters with sounds."""
    build = sound_model(f"{class_name}ForCTC", vocab_size=EVEN_VOCABULARY, **IDS, **sizes)
    return ModelCase(name, build, _spoken, samples)


def _sounds_and_text(batch_size: int, generator: torch.Generator) -> Batch:
    batch = PAIRS(batch_size, generator)
    del batch["pixel_values"]
    return {**batch, "input_features": torch.randn(batch_size, 1, 64, 16, generator=generator)}


def _alt_clip(dropout: float) -> nn.Module:
    rates = dict.fromkeys(BERT_DROPOUTS, dropout)
    text = {**TEXT, **rates, "project_dim": HIDDEN, "max_position_embeddings": SEQUENCE + 2}
    config = transformers.AltCLIPConfig(
        text_config=text, vision_config={**VISION, "attention_dropout": dropout}
    )
    return Contrastive(transformers.AltCLIPModel(config))


class _Frozen(Contrastive):
    """With batch norms that keep their statistics, as in most fine-tuning."""

    def train(self, mode: bool = True) -> _Frozen:
        """The other modules are in training."""
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self


def _clap(dropout: float) -> nn.Module:
    rates = dict.fromkeys(BERT_DROPOUTS, dropout)
    text = {**TEXT, **rates, "projection_dim": HIDDEN, "max_position_embeddings": SEQUENCE + 2}
    audio = {
        "window_size": 4, "num_mel_bins": 16, "spec_size": 64, "patch_size": 4,
        "patch_stride": [4, 4], "num_classes": CLASSES, "hidden_size": HIDDEN,
        "patch_embeds_hidden_size": 8, "depths": [1, 1, 1], "num_attention_heads": [2, 2, 4],
        "enable_fusion": False, "num_hidden_layers": 3, "drop_path_rate": 0.0,
        "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout,
        "projection_hidden_size": HIDDEN, "projection_dim": HIDDEN, "mlp_ratio": 2.0,
    }  # fmt: skip
    config = transformers.ClapConfig(
        text_config=text, audio_config=audio, projection_dim=HIDDEN, num_hidden_layers=2
    )
    return _Frozen(transformers.ClapModel(config))


def _vlm(name: str, **sizes: Any) -> Callable[[float], nn.Module]:
    """Images whose features stand in the places that the text has for them."""

    def build(dropout: float) -> nn.Module:
        config = getattr(transformers, f"{name}Config")(**sizes)
        config.text_config.attention_dropout = dropout
        model: nn.Module = getattr(transformers, f"{name}ForConditionalGeneration")(config)
        return model

    return build


def _two_images_in_text(batch_size: int, generator: torch.Generator) -> Batch:
    """Two images for each text, all images behind one another."""
    batch = images_in_text(batch_size, generator)
    batch["input_ids"][:, PATCHES : 2 * PATCHES] = IMAGE_WORD
    batch["attention_mask"][:, : 2 * PATCHES + 2] = 1
    batch["labels"][:, : 2 * PATCHES] = -100
    batch["labels"][:, 2 * PATCHES : 2 * PATCHES + 2] = IMAGE_WORD + 2
    shape = (2 * batch_size, 3, IMAGE, IMAGE)
    return {**batch, "pixel_values": torch.randn(shape, generator=generator)}


def _patched_images(batch_size: int, generator: torch.Generator) -> Batch:
    """Images as rows of patches of 4 by 4, and how many patches each has."""
    batch = images_in_text(batch_size, generator)
    rows = 4 * PATCHES  # four patches make one word
    pixels = torch.randn(batch_size * rows, 3 * 2 * 4 * 4, generator=generator)
    grid = torch.tensor([[1, 4, 4]]).repeat(batch_size, 1)
    types = (batch["input_ids"] == IMAGE_WORD).long()
    return {**batch, "pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": types}


_QWEN_TEXT: dict[str, Any] = {
    **LLAMA,
    "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
}
_QWEN_IDS: dict[str, Any] = {
    "image_token_id": IMAGE_WORD,
    "video_token_id": EVEN_VOCABULARY - 1,
    "vision_start_token_id": EVEN_VOCABULARY - 2,
    "vision_end_token_id": EVEN_VOCABULARY - 3,
}
_CLIP_VISION: dict[str, Any] = {**VISION, "model_type": "clip_vision_model"}
_SIGLIP_VISION: dict[str, Any] = {**VISION, "model_type": "siglip_vision_model"}


def _series(batch_size: int, generator: torch.Generator) -> Batch:
    """Numbers of the past, of which some were not observed, those to come, and their times."""
    past = _CONTEXT + max(_LAGS)
    values = torch.randn(batch_size, past, generator=generator).cumsum(1)
    return {
        "past_values": values,
        "past_time_features": torch.randn(batch_size, past, 2, generator=generator),
        "past_observed_mask": (torch.rand(batch_size, past, generator=generator) < 0.9).float(),
        "future_values": torch.randn(batch_size, _AHEAD, generator=generator),
        "future_time_features": torch.randn(batch_size, _AHEAD, 2, generator=generator),
    }


class _Undrawn(TorchFunctionMode):
    """Takes places in turn where a model draws some of them at random."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.randint:
            low, high, size = args
            return low + torch.arange(math.prod(size)).view(size) % (high - low)
        return func(*args, **(kwargs or {}))


class _Sparse(Around):
    """An Informer, in its default form, whose keys are not drawn."""

    def forward(self, **batch: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss."""
        with _Undrawn():
            return {"loss": self.inner(**batch).loss}


def _forecasting(
    name: str, class_name: str, around: Callable[[nn.Module], nn.Module] | None = None, **sizes: Any
) -> ModelCase:
    build = transformers_model(
        f"{class_name}ForPrediction", SEQ2SEQ_DROPOUTS, prediction_length=_AHEAD,
        context_length=_CONTEXT, lags_sequence=_LAGS, num_time_features=2, d_model=16,
        encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=32, decoder_ffn_dim=32, encoder_layerdrop=0.0, decoder_layerdrop=0.0,
        scaling="mean", **sizes,
    )  # fmt: skip
    made = build if around is None else lambda dropout: around(build(dropout))
    return ModelCase(name, made, _series, samples)


def _windows(batch_size: int, generator: torch.Generator) -> Batch:
    return {
        "past_values": torch.randn(batch_size, 16, 3, generator=generator),
        "future_values": torch.randn(batch_size, _AHEAD, 3, generator=generator),
    }


NEW_MIXED = (
    ModelCase("altclip", _alt_clip, PAIRS, samples),
    ModelCase("clap", _clap, _sounds_and_text, samples),
    ModelCase(
        "llava_two_images",
        _vlm("Llava", text_config={**LLAMA, "model_type": "llama"}, vision_config=_CLIP_VISION,
             image_token_index=IMAGE_WORD, image_seq_length=4),
        _two_images_in_text,
        shifted,
    ),
    ModelCase(
        "paligemma",
        _vlm("PaliGemma",
             text_config={**LLAMA, "model_type": "gemma", "head_dim": HIDDEN // HEADS},
             vision_config=_SIGLIP_VISION, image_token_index=IMAGE_WORD, projection_dim=HIDDEN),
        images_in_text,
        shifted,
        casts_float32=True,
    ),
    ModelCase(
        "internvl",
        _vlm("InternVL", text_config={**LLAMA, "model_type": "qwen2"},
             vision_config={**TOWER, "image_size": [IMAGE, IMAGE], "patch_size": [4, 4]},
             image_token_id=IMAGE_WORD, image_seq_length=4),
        images_in_text,
        shifted,
    ),
    ModelCase(
        "qwen2_vl",
        _vlm("Qwen2VL", text_config=_QWEN_TEXT, **_QWEN_IDS,
             vision_config={"depth": 2, "embed_dim": HIDDEN, "hidden_size": HIDDEN,
                            "num_heads": HEADS, "mlp_ratio": 2, "patch_size": 4}),
        _patched_images,
        shifted,
    ),
    ModelCase(
        "qwen2_5_vl",
        _vlm("Qwen2_5_VL", text_config=_QWEN_TEXT, **_QWEN_IDS,
             vision_config={"depth": 2, "hidden_size": HIDDEN, "out_hidden_size": HIDDEN,
                            "num_heads": HEADS, "intermediate_size": WIDE, "patch_size": 4,
                            "window_size": 16, "fullatt_block_indexes": [1]}),
        _patched_images,
        shifted,
    ),
    ModelCase(
        "git",
        transformers_model(
            "GitForCausalLM", BERT_DROPOUTS,
            **{**TEXT, "num_hidden_layers": LAYERS, "max_position_embeddings": 2 * SEQUENCE},
            vision_config=VISION,
        ),
        partial(images_and_text, EVEN_VOCABULARY, IMAGE, labels=True),
        shifted,
    ),
    _letters("wav2vec2_ctc", "Wav2Vec2"),
    _letters("wav2vec2_ctc_mean", "Wav2Vec2", ctc_loss_reduction="mean"),
    hearing("wavlm", "WavLM", num_buckets=8, max_bucket_distance=16),
    _forecasting("informer", "Informer", attention_type="full", distil=False),
    _forecasting("informer_sparse", "Informer", _Sparse, attention_type="prob", sampling_factor=2,
                 distil=False),
    _forecasting("autoformer", "Autoformer", label_length=4, moving_average=3,
                 autocorrelation_factor=1),
    ModelCase(
        "patchtst",
        transformers_model(
            "PatchTSTForPrediction", ("attention_dropout", "ff_dropout", "path_dropout"),
            num_input_channels=3, context_length=16, patch_length=4, patch_stride=4,
            prediction_length=_AHEAD, d_model=16, num_attention_heads=2, num_hidden_layers=LAYERS,
            ffn_dim=32, loss="mse", norm_type="layernorm",
        ),
        _windows,
        samples,
    ),
    ModelCase(
        "patchtsmixer",
        transformers_model(
            "PatchTSMixerForPrediction", ("dropout", "head_dropout"),
            context_length=16, patch_length=4, patch_stride=4, num_input_channels=3,
            prediction_length=_AHEAD, d_model=16, num_layers=LAYERS, loss="mse",
            norm_mlp="LayerNorm",
        ),
        _windows,
        samples,
    ),
)  # fmt: skip
