"""Decoders of transformers: attention in all its variants, mixtures of experts, recurrences."""

from __future__ import annotations

from typing import Any

from benchmarks.models import (
    EVEN_VOCABULARY,
    GPT_DROPOUTS,
    GPT_SIZES,
    GROUPED,
    HEADS,
    HIDDEN,
    IDS,
    LAYERS,
    ODD_VOCABULARY,
    SEQUENCE,
    WIDE,
    causal_case,
    like_llama,
    transformers_model,
)

WINDOW = 6  # less than the sequence, so that sliding windows slide
HEAD = HIDDEN // HEADS
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": HIDDEN}
# Of DeepSeek's mixtures of experts, with latent attention.
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": HEADS, "n_routed_experts": 4, "topk_group": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "v_head_dim": HEAD, **_EXPERTS,
}  # fmt: skip
TURNS = ["sliding_attention", "full_attention"] * (LAYERS // 2)

DECODERS = (
    causal_case(
        "gpt_neo",
        transformers_model(
            "GPTNeoForCausalLM", ("resid_dropout", "embed_dropout", "attention_dropout"),
            vocab_size=ODD_VOCABULARY, hidden_size=HIDDEN, num_layers=LAYERS, num_heads=HEADS,
            attention_types=[[["global", "local"], LAYERS // 2]], window_size=WINDOW,
            max_position_embeddings=SEQUENCE, bos_token_id=1, eos_token_id=2,
        ),
        ODD_VOCABULARY,
    ),
    causal_case(
        "gptj",
        transformers_model("GPTJForCausalLM", GPT_DROPOUTS, rotary_dim=4, **GPT_SIZES),
        ODD_VOCABULARY,
    ),
    causal_case(
        "bloom",
        transformers_model(
            "BloomForCausalLM", ("hidden_dropout", "attention_dropout"),
            vocab_size=EVEN_VOCABULARY, hidden_size=HIDDEN, n_layer=LAYERS, n_head=HEADS,
            pad_token_id=0,
        ),
    ),
    like_llama(
        "falcon", "Falcon", "hidden_dropout", "attention_dropout", multi_query=True,
        ffn_hidden_size=WIDE,
    ),
    like_llama("qwen3", "Qwen3", head_dim=HEAD, **GROUPED),
    like_llama(
        "qwen2_moe", "Qwen2Moe", num_experts=4, shared_expert_intermediate_size=WIDE, **_EXPERTS,
        **GROUPED,
    ),
    like_llama(
        "gemma2", "Gemma2", head_dim=HEAD, query_pre_attn_scalar=HEAD, sliding_window=WINDOW,
        **GROUPED,
    ),
    like_llama(
        "gemma3", "Gemma3", head_dim=HEAD, query_pre_attn_scalar=HEAD, sliding_window=WINDOW,
        layer_types=TURNS, **GROUPED,
    ),
    like_llama("phi3", "Phi3", *GPT_DROPOUTS[:2], "attention_dropout", **GROUPED),
    like_llama("stablelm", "StableLm", "hidden_dropout", "attention_dropout", **GROUPED),
    like_llama("olmo2", "Olmo2", **GROUPED),
    like_llama("cohere", "Cohere", use_qk_norm=True, **GROUPED),
    like_llama(
        "granite", "Granite", embedding_multiplier=2.0, logits_scaling=2.0,
        residual_multiplier=0.5, **GROUPED,
    ),
    like_llama("deepseek_v3", "DeepseekV3", n_group=2, **DEEPSEEK),
    causal_case(
        "mamba",
        transformers_model(
            "MambaForCausalLM", (), vocab_size=EVEN_VOCABULARY, hidden_size=HIDDEN, state_size=4,
            num_hidden_layers=LAYERS, time_step_rank=4, **IDS,
        ),
    ),
    causal_case(
        "rwkv",
        transformers_model(
            "RwkvForCausalLM", (), vocab_size=EVEN_VOCABULARY, context_length=SEQUENCE,
            hidden_size=HIDDEN, attention_hidden_size=HIDDEN, intermediate_size=WIDE,
            num_hidden_layers=LAYERS, bos_token_id=1, eos_token_id=2,
        ),
    ),
)  # fmt: skip
