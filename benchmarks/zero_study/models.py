"""mT5s of any size, as published: one embedding for encoder and decoder, the head untied."""

from __future__ import annotations

from dataclasses import dataclass

import transformers
from torch import nn


@dataclass(frozen=True, slots=True)
class Size:
    """A model's sizes: of its parameters, and its configuration's."""

    name: str
    hidden_size: int
    ffn_size: int
    layers: int
    heads: int


def mt5(size: Size, vocabulary: int, dropout: float = 0.1) -> nn.Module:
    """A stock mT5 on the default device."""
    config = transformers.MT5Config(
        vocab_size=vocabulary, d_model=size.hidden_size, d_ff=size.ffn_size, d_kv=64,
        num_layers=size.layers, num_decoder_layers=size.layers, num_heads=size.heads,
        dropout_rate=dropout, use_cache=False,
    )  # fmt: skip
    config.tie_word_embeddings = False  # the configuration ties the head too
    model = transformers.MT5ForConditionalGeneration(config)
    model.set_input_embeddings(model.shared)  # of the encoder and the decoder
    return model
