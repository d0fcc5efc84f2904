"""Small models of Hugging Face, of the kinds that are trained most, and a larger one to time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Batch = dict[str, torch.Tensor]
HIDDEN, HEADS, GROUPS, WIDE, LAYERS, WORDS, LENGTH = 128, 4, 2, 256, 4, 512, 64


@dataclass(frozen=True)
class Model:
    """A model by the name of its class in transformers."""

    name: str
    kind: str
    options: Mapping[str, Any]
    padded: bool = False

    def build(self) -> nn.Module:
        """Float32 weights, the same at every call; no dropout, which eager draws otherwise."""
        import transformers

        kind = getattr(transformers, self.kind)
        torch.manual_seed(0)
        made: nn.Module = kind(kind.config_class(**self.options))
        return made.train()

    def batch(self, samples: int, seed: int = 0) -> Batch:
        """Random words; labels that miss for some, padding at the end where the model reads it."""
        draws = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, WORDS, (samples, LENGTH), generator=draws)
        labels = ids.masked_fill(torch.rand(ids.shape, generator=draws) < 0.2, -100)
        batch = {"input_ids": ids, "labels": labels}
        if self.padded:
            lengths = torch.randint(LENGTH // 2, LENGTH + 1, (samples, 1), generator=draws)
            mask = (torch.arange(LENGTH) < lengths).long()
            batch["attention_mask"], batch["labels"] = mask, labels.masked_fill(mask == 0, -100)
        return batch


_LLAMA = {
    "vocab_size": WORDS, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "intermediate_size": WIDE,
    "max_position_embeddings": LENGTH, "use_cache": False,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
MODELS = {
    model.name: model
    for model in (
        Model("llama", "LlamaForCausalLM", _LLAMA),
        Model(
            "gpt2", "GPT2LMHeadModel",
            {"vocab_size": WORDS, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS,
             "n_positions": LENGTH, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
             "use_cache": False, "bos_token_id": None, "eos_token_id": None},
            padded=True,
        ),
        Model(
            "t5", "T5ForConditionalGeneration",
            {"vocab_size": WORDS, "d_model": HIDDEN, "d_kv": HIDDEN // HEADS, "d_ff": WIDE,
             "num_layers": LAYERS, "num_decoder_layers": LAYERS, "num_heads": HEADS,
             "dropout_rate": 0.0, "decoder_start_token_id": 0, "use_cache": False},
            padded=True,
        ),
        Model(
            "bert", "BertForMaskedLM",
            {"vocab_size": WORDS, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
             "num_attention_heads": HEADS, "intermediate_size": WIDE,
             "max_position_embeddings": LENGTH, "hidden_dropout_prob": 0.0,
             "attention_probs_dropout_prob": 0.0},
            padded=True,
        ),
        Model("mixtral", "MixtralForCausalLM",
              {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    )
}  # fmt: skip


def large_llama(layers: int, *, small: bool = False) -> tuple[nn.Module, int]:
    """As Llama 3.2 1B, which has 16 layers, on the current device; and its words. A small one is as
    deep, for what has no time.
    """
    import transformers

    words, width = (1024, 64) if small else (128256, 2048)
    config = transformers.LlamaConfig(
        vocab_size=words, hidden_size=width, num_hidden_layers=layers,
        num_attention_heads=width // 64, num_key_value_heads=max(width // 256, 1),
        intermediate_size=4 * width, max_position_embeddings=8192, tie_word_embeddings=True,
        use_cache=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), words
