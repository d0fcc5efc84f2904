"""Decoders of transformers of other families: recurrences, parallel blocks, latent attention."""

from __future__ import annotations

from typing import Any

from torch import nn

from benchmarks.models import (
    EVEN_VOCABULARY,
    GROUPED,
    HEADS,
    HIDDEN,
    LAYERS,
    decoder,
    transformers_model,
)
from benchmarks.zoo_models.decoders import causal_case, like_llama

_HEAD = HIDDEN // HEADS
_WINDOW = 6


def _gemma3n(dropout: float) -> nn.Module:
    model = decoder(
        "Gemma3n", dropouts=("attention_dropout",), config="Gemma3nText", head_dim=_HEAD,
        sliding_window=_WINDOW, layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2),
        num_kv_shared_layers=1, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=EVEN_VOCABULARY, laurel_rank=8, altup_num_inputs=2,
        activation_sparsity_pattern=[0.5, 0.5, 0.0, 0.0], **GROUPED,
    )(dropout)  # fmt: skip
    for module in model.modules():  # by which its forward would write to its parameters
        if hasattr(module, "config"):
            vars(module.config)["altup_coef_clip"] = None
    return model


_IDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

NEW_DECODERS = (
    like_llama("phi", "Phi", "attention_dropout", "resid_pdrop", "embd_pdrop"),
    like_llama(
        "deepseek_v2", "DeepseekV2", num_key_value_heads=HEADS, n_routed_experts=4, n_group=1,
        topk_group=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4,
        qk_nope_head_dim=4, v_head_dim=_HEAD, num_experts_per_tok=2, moe_intermediate_size=HIDDEN,
        n_shared_experts=1, topk_method="greedy", head_dim=4,
    ),
    causal_case("gemma3n", _gemma3n),
    causal_case(
        "mamba2",
        transformers_model(
            "Mamba2ForCausalLM", "Mamba2Config", (), vocab_size=EVEN_VOCABULARY, hidden_size=HIDDEN,
            num_heads=8, head_dim=8, state_size=8, n_groups=2, num_hidden_layers=LAYERS,
            chunk_size=4, **_IDS,
        ),
    ),
    like_llama(
        "recurrent_gemma", "RecurrentGemma", attention_window_size=_WINDOW, lru_width=HIDDEN,
        block_types=["recurrent", "attention"], conv1d_width=2, head_dim=_HEAD, **GROUPED,
    ),
)  # fmt: skip
