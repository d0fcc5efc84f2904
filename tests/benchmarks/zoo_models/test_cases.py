"""The zoo's cases are what the issue of coverage asks for: many, tiny, in float64, as a mean."""

from __future__ import annotations

import pytest
import torch

from benchmarks.models import MODELS
from benchmarks.reference import split_batch
from benchmarks.zoo_models import FAMILIES, ZOO
from merakc.equality.casts import lifted_casts

OURS = ("transformer_encoder", "resnet")
NEW = [name for name in ZOO if name not in MODELS]


# What the coverage page must have, by name.
PROMISED = """
    gpt2 gpt_neo gptj gpt_neox opt bloom falcon llama mistral mixtral qwen2 qwen3 qwen2_moe gemma2
    gemma3 phi3 stablelm olmo2 cohere granite deepseek_v3 mamba rwkv
    bert roberta albert electra deberta_v2 distilbert modernbert
    t5 mt5 bart mbart pegasus m2m_100 whisper speech_to_text
    vit swin deit dinov2 convnext segformer resnet
    clip blip siglip llava wav2vec2 hubert
    nn_transformer unet mlp_mixer lstm dit
    olmoe mixtral_balanced qwen3_moe deepseek_v2 altclip clap llava_two_images qwen2_vl qwen2_5_vl
    wav2vec2_ctc detr yolos led longformer informer autoformer gemma3n reformer levit
"""


def test_the_zoo_has_every_promised_architecture() -> None:
    assert set(PROMISED.split()) <= ZOO.keys()


def test_the_zoo_is_large_and_not_only_transformers() -> None:
    assert sum(map(len, FAMILIES.values())) == len(ZOO), "two cases of one name"
    assert len(ZOO) >= 120
    assert len(FAMILIES["plain PyTorch"]) + len(FAMILIES["other packages"]) + len(OURS) >= 20


@pytest.mark.parametrize("name", NEW)
def test_a_case_is_tiny_in_float64_and_says_what_it_writes(name: str) -> None:
    case = ZOO[name]
    model, batch = case.model(torch.float64), case.batch(8, torch.float64)
    assert sum(p.numel() for p in model.parameters()) < 250_000
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    with lifted_casts(), torch.no_grad():
        whole = model(**batch)["loss"]
    assert whole.dtype == torch.float64
    assert whole.isfinite()
    written = any(not torch.equal(b, buffers[n]) for n, b in model.named_buffers())
    assert written == case.running_statistics


@pytest.mark.parametrize("name", [n for n in NEW if ZOO[n].running_statistics])
def test_a_loss_of_parts_is_a_mean_over_their_valid_labels(name: str) -> None:
    case = ZOO[name]
    model, batch = case.model(torch.float64).eval(), case.batch(8, torch.float64)
    with lifted_casts(), torch.no_grad():
        whole = model(**batch)["loss"]
        halves = split_batch(batch, 2)
        counts = [case.valid_labels(half) for half in halves]
        losses = [model(**half)["loss"].item() for half in halves]
    assert sum(counts) == case.valid_labels(batch)
    mean = sum(a * n for a, n in zip(losses, counts, strict=True)) / sum(counts)
    assert mean == pytest.approx(whole.item(), rel=1e-9)
