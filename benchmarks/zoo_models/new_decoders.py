"""Decoders of transformers of other families: recurrences, parallel blocks, latent attention."""

from __future__ import annotations

from torch import nn

from benchmarks.models import (
    EVEN_VOCABULARY,
    GROUPED,
    HIDDEN,
    IDS,
    LAYERS,
    causal_case,
    like_llama,
    transformers_model,
)
from benchmarks.zoo_models.decoders import DEEPSEEK, HEAD, TURNS, WINDOW


def _gemma3n(dropout: float) -> nn.Module:
    model = like_llama(
        "", "Gemma3n", head_dim=HEAD, sliding_window=WINDOW, layer_types=TURNS,
        num_kv_shared_layers=1, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=EVEN_VOCABULARY, laurel_rank=8, altup_num_inputs=2,
        activation_sparsity_pattern=[0.5, 0.5, 0.0, 0.0], **GROUPED,
    ).build(dropout)  # fmt: skip
    for module in model.modules():  # by which its forward would write to its parameters
        if hasattr(module, "config"):
            vars(module.config)["altup_coef_clip"] = None
    return model


NEW_DECODERS = (
    like_llama("phi", "Phi", "attention_dropout", "resid_pdrop", "embd_pdrop"),
    like_llama(
        "deepseek_v2", "DeepseekV2", n_group=1, n_shared_experts=1, topk_method="greedy",
        head_dim=4, **DEEPSEEK,
    ),
    causal_case("gemma3n", _gemma3n),
    causal_case(
        "mamba2",
        transformers_model(
            "Mamba2ForCausalLM", (), vocab_size=EVEN_VOCABULARY, hidden_size=HIDDEN, num_heads=8,
            head_dim=8, state_size=8, n_groups=2, num_hidden_layers=LAYERS, chunk_size=4, **IDS,
        ),
    ),
    like_llama(
        "recurrent_gemma", "RecurrentGemma", attention_window_size=WINDOW, lru_width=HIDDEN,
        block_types=["recurrent", "attention"], conv1d_width=2, head_dim=HEAD, **GROUPED,
    ),
)  # fmt: skip
