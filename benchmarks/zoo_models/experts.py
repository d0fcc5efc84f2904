"""Mixtures of experts with the loss that spreads their load, which couples a batch's samples."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.models import (
    EVEN_VOCABULARY,
    GROUPED,
    HEADS,
    HIDDEN,
    SEQUENCE,
    WIDE,
    ModelCase,
    like_bart,
    like_llama,
    text_to_text_batch,
    transformers_model,
    unshifted,
)

_HEAD = HIDDEN // HEADS
_AUXILIARY: dict[str, Any] = {"num_experts_per_tok": 2, "output_router_logits": True, **GROUPED}
_case = partial(like_llama, **_AUXILIARY)
_SWITCH: dict[str, Any] = {
    "vocab_size": EVEN_VOCABULARY, "d_model": HIDDEN, "d_kv": _HEAD, "d_ff": WIDE, "num_layers": 2,
    "num_sparse_encoder_layers": 1, "num_decoder_layers": 2, "num_sparse_decoder_layers": 1,
    "num_heads": HEADS, "num_experts": 4,
    "expert_capacity": 64,  # no word is dropped
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 10,
    "router_jitter_noise": 0.0, "pad_token_id": 0, "decoder_start_token_id": 0,
}  # fmt: skip

EXPERTS = (
    _case("mixtral_balanced", "Mixtral", num_local_experts=4),
    _case("olmoe", "Olmoe", num_experts=4),
    _case("qwen3_moe", "Qwen3Moe", num_experts=4, moe_intermediate_size=HIDDEN, head_dim=_HEAD,
          norm_topk_prob=True),
    _case("granite_moe", "GraniteMoe", num_local_experts=4),
    _case("gpt_oss", "GptOss", num_local_experts=4, head_dim=_HEAD, sliding_window=6),
    _case("minimax", "MiniMax", num_local_experts=4, head_dim=_HEAD, block_size=4),
    _case("jamba", "Jamba", num_experts=4, use_mamba_kernels=False, mamba_d_state=4,
          mamba_dt_rank=4, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
          expert_layer_offset=1),
    ModelCase(
        "switch_transformers",
        transformers_model("SwitchTransformersForConditionalGeneration", ("dropout_rate",),
                           output_router_logits=True, **_SWITCH),
        partial(text_to_text_batch, EVEN_VOCABULARY),
        unshifted,
        casts_float32=True,
    ),
    like_bart("nllb_moe", "NllbMoe", casts_float32=True, output_router_logits=True, num_experts=4,
              expert_capacity=64, encoder_sparse_step=2, decoder_sparse_step=2,
              moe_token_dropout=0.0, max_position_embeddings=SEQUENCE),
)  # fmt: skip
