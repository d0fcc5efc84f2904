"""Encoders of transformers, trained on masked words."""

from __future__ import annotations

from typing import Any

from benchmarks.models import (
    BERT_DROPOUTS,
    HEADS,
    HIDDEN,
    LAYERS,
    ODD_VOCABULARY,
    SEQUENCE,
    WIDE,
    ModelCase,
    masked_batch,
    transformers_model,
    unshifted,
)

_NARROW = 16  # embeddings narrower than the layers
_SIZES: dict[str, Any] = {
    "vocab_size": ODD_VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": SEQUENCE,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _case(
    name: str, class_name: str, dropouts: tuple[str, ...] = BERT_DROPOUTS, **sizes: Any
) -> ModelCase:
    build = transformers_model(
        f"{class_name}ForMaskedLM", f"{class_name}Config", dropouts, **_SIZES | sizes
    )
    return ModelCase(name, build, masked_batch(ODD_VOCABULARY), unshifted)


ENCODERS = (
    # Its positions are counted from behind the padding's id.
    _case("roberta", "Roberta", max_position_embeddings=SEQUENCE + 2),
    _case("albert", "Albert", embedding_size=_NARROW),
    _case("electra", "Electra", embedding_size=_NARROW),
    _case(
        "deberta_v2",
        "DebertaV2",
        relative_attention=True,
        position_buckets=4,
        pos_att_type=["p2c", "c2p"],
        norm_rel_ebd="layer_norm",
        share_att_key=True,
    ),
    _case(
        "modernbert",
        "ModernBert",
        ("attention_dropout", "embedding_dropout", "mlp_dropout"),
        local_attention=6,
        cls_token_id=1,
        sep_token_id=2,
    ),
    ModelCase(
        "distilbert",
        transformers_model(
            "DistilBertForMaskedLM",
            "DistilBertConfig",
            ("dropout", "attention_dropout"),
            vocab_size=ODD_VOCABULARY,
            max_position_embeddings=SEQUENCE,
            n_layers=LAYERS,
            n_heads=HEADS,
            dim=HIDDEN,
            hidden_dim=WIDE,
            pad_token_id=0,
        ),
        masked_batch(ODD_VOCABULARY),
        unshifted,
    ),
)
