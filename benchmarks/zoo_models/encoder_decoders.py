"""Encoder-decoders of transformers: text to text, and speech to text."""

from __future__ import annotations

from functools import partial

from benchmarks.models import (
    EVEN_VOCABULARY,
    FRAMES,
    MELS,
    SEQ2SEQ_DROPOUTS,
    SEQ2SEQ_SIZES,
    SEQUENCE,
    WIDE,
    ModelCase,
    like_bart,
    like_t5,
    transformers_model,
    unshifted,
)
from benchmarks.zoo_models.batches import spectra_and_text

ENCODER_DECODERS = (
    like_t5("mt5", "MT5"),
    like_bart("mbart", "MBart", max_position_embeddings=SEQUENCE),
    like_bart("pegasus", "Pegasus", max_position_embeddings=SEQUENCE),
    like_bart("m2m_100", "M2M100", max_position_embeddings=SEQUENCE),
    ModelCase(
        "speech_to_text",
        transformers_model(
            "Speech2TextForConditionalGeneration", SEQ2SEQ_DROPOUTS, vocab_size=EVEN_VOCABULARY,
            max_source_positions=FRAMES, max_target_positions=SEQUENCE, conv_channels=WIDE,
            input_feat_per_channel=MELS, **SEQ2SEQ_SIZES,
        ),
        partial(spectra_and_text, EVEN_VOCABULARY),
        unshifted,
    ),
)  # fmt: skip
