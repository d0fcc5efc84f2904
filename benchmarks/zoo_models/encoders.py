"""Encoders of transformers, trained on masked words."""

from __future__ import annotations

from benchmarks.models import (
    HEADS,
    HIDDEN,
    LAYERS,
    ODD_VOCABULARY,
    SEQUENCE,
    WIDE,
    ModelCase,
    masked_batch,
    masked_case,
    transformers_model,
    unshifted,
)

_NARROW = 16  # embeddings narrower than the layers

ENCODERS = (
    # Its positions are counted from behind the padding's id.
    masked_case("roberta", "Roberta", max_position_embeddings=SEQUENCE + 2),
    masked_case("albert", "Albert", embedding_size=_NARROW),
    masked_case("electra", "Electra", embedding_size=_NARROW),
    masked_case("deberta_v2", "DebertaV2", relative_attention=True, position_buckets=4,
                pos_att_type=["p2c", "c2p"], norm_rel_ebd="layer_norm", share_att_key=True),
    masked_case("modernbert", "ModernBert",
                ("attention_dropout", "embedding_dropout", "mlp_dropout"), local_attention=6,
                cls_token_id=1, sep_token_id=2),
    ModelCase(
        "distilbert",
        transformers_model(
            "DistilBertForMaskedLM", ("dropout", "attention_dropout"), vocab_size=ODD_VOCABULARY,
            max_position_embeddings=SEQUENCE, n_layers=LAYERS, n_heads=HEADS, dim=HIDDEN,
            hidden_dim=WIDE, pad_token_id=0,
        ),
        masked_batch,
        unshifted,
    ),
)  # fmt: skip
