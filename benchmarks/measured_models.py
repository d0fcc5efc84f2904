"""The small models of `benchmarks.measured_cells`, and their batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import nn

LENGTH, VOCABULARY = 96, 512
WIDTH, HEADS, LAYERS = 256, 4, 4
IMAGE, PATCH = 72, 8
Batch = dict[str, Any]


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS,
        use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=3 * WIDTH,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=2,
        max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def _bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=4 * WIDTH,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, max_position_embeddings=LENGTH,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def _t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=WIDTH // HEADS, d_ff=3 * WIDTH, num_layers=2,
        num_decoder_layers=2, num_heads=HEADS, decoder_start_token_id=0, pad_token_id=0,
        use_cache=False,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def _clip() -> nn.Module:
    tower = {
        "hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
    }  # fmt: skip
    text = {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": LENGTH,
        "eos_token_id": 0,
        "bos_token_id": 0,
    }
    vision = {"image_size": IMAGE, "patch_size": PATCH}
    config = transformers.CLIPConfig(
        text_config={**text, **tower}, vision_config={**vision, **tower}, projection_dim=WIDTH
    )
    return transformers.CLIPModel(config)


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "gpt2": _gpt2, "llama": _llama, "bert": _bert, "t5": _t5, "clip": _clip,
}  # fmt: skip


def make_batch(model: str, size: int, seed: int = 0) -> Batch:
    """Random words, and the labels of the model's kind."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (size, LENGTH), generator=generator)
    if model == "clip":
        pixels = torch.randn(size, 3, IMAGE, IMAGE, generator=generator)
        return {"input_ids": ids, "pixel_values": pixels, "return_loss": True}
    return {"input_ids": ids, "labels": ids}
