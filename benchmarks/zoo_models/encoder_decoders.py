"""Encoder-decoders of transformers: text to text, and speech to text."""

from __future__ import annotations

from typing import Any

from benchmarks.models import (
    EVEN_VOCABULARY,
    FRAMES,
    MELS,
    SEQ2SEQ_DROPOUTS,
    SEQUENCE,
    T5_SIZES,
    WIDE,
    ModelCase,
    speech_and_text_sizes,
    text_to_text_batch,
    transformers_model,
    unshifted,
)
from benchmarks.zoo_models.batches import spectra_and_text

# Whole layers that are left out at random would make the graph depend on the draw.
_NO_LAYERDROP = {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}


def _like_bart(name: str, class_name: str, **sizes: Any) -> ModelCase:
    build = transformers_model(
        f"{class_name}ForConditionalGeneration",
        f"{class_name}Config",
        SEQ2SEQ_DROPOUTS,
        **speech_and_text_sizes(
            vocab_size=EVEN_VOCABULARY, max_position_embeddings=SEQUENCE, **_NO_LAYERDROP, **sizes
        ),
    )
    return ModelCase(name, build, text_to_text_batch(EVEN_VOCABULARY), unshifted)


ENCODER_DECODERS = (
    ModelCase(
        "mt5",
        transformers_model(
            "MT5ForConditionalGeneration", "MT5Config", ("dropout_rate",), **T5_SIZES
        ),
        text_to_text_batch(EVEN_VOCABULARY),
        unshifted,
        casts_float32=True,
    ),
    _like_bart("mbart", "MBart"),
    _like_bart("pegasus", "Pegasus"),
    _like_bart("m2m_100", "M2M100"),
    ModelCase(
        "speech_to_text",
        transformers_model(
            "Speech2TextForConditionalGeneration",
            "Speech2TextConfig",
            SEQ2SEQ_DROPOUTS,
            **speech_and_text_sizes(
                vocab_size=EVEN_VOCABULARY,
                max_source_positions=FRAMES,
                max_target_positions=SEQUENCE,
                conv_channels=WIDE,
                input_feat_per_channel=MELS,
                **_NO_LAYERDROP,
            ),
        ),
        spectra_and_text(EVEN_VOCABULARY),
        unshifted,
    ),
)
