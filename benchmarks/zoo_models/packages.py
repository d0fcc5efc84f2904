"""Models of other packages, x-transformers and diffusers, imported when a model is built."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import (
    CLASSES,
    HEADS,
    HIDDEN,
    IMAGE,
    LAYERS,
    ODD_VOCABULARY,
    SEQUENCE,
    ModelCase,
)
from benchmarks.zoo_models.batches import noisy_images, plain_text, samples

CHANNELS = 4  # of a latent image


class WithLoss(nn.Module):
    """A model that returns predictions, and the loss that its users compute from them."""

    def __init__(self, inner: nn.Module, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.inner = inner
        self.loss = loss

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        """The loss alone."""
        return {"loss": self.loss(self.inner, **batch)}


def _next_word(inner: nn.Module, input_ids: Tensor) -> Tensor:
    logits = inner(input_ids[:, :-1])
    return F.cross_entropy(logits.transpose(1, 2), input_ids[:, 1:])


def _noise(
    inner: nn.Module, sample: Tensor, timestep: Tensor, class_labels: Tensor, target: Tensor
) -> Tensor:
    return F.mse_loss(inner(sample, timestep, class_labels=class_labels).sample, target)


def _described_noise(
    inner: nn.Module, sample: Tensor, timestep: Tensor, class_labels: Tensor, target: Tensor
) -> Tensor:
    """The classes stand for a text of one word."""
    words = F.one_hot(class_labels, HIDDEN)[:, None].to(sample.dtype)
    return F.mse_loss(inner(sample, timestep, words).sample, target)


def _library(name: str) -> ModuleType:
    """Imports a package that is slow to import, and whose deprecated calls are not our concern."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module(name)


def _x_transformers(layers: str, **options: Any) -> Callable[[float], nn.Module]:
    def build(dropout: float) -> nn.Module:
        library = _library("x_transformers")
        inner = library.TransformerWrapper(
            num_tokens=ODD_VOCABULARY,
            max_seq_len=SEQUENCE,
            attn_layers=getattr(library, layers)(
                dim=HIDDEN, depth=LAYERS, heads=HEADS, attn_dim_head=HIDDEN // HEADS,
                attn_dropout=dropout, ff_dropout=dropout, **options,
            ),
        )  # fmt: skip
        return WithLoss(inner, _next_word)

    return build


def _diffusers(
    name: str, loss: Callable[..., Tensor], **sizes: Any
) -> Callable[[float], nn.Module]:
    def build(dropout: float) -> nn.Module:
        inner = getattr(_library("diffusers"), name)(**sizes, dropout=dropout)
        for module in inner.modules():
            if hasattr(module, "dropout_prob"):  # of the class labels; no config names it
                module.dropout_prob = dropout
        return WithLoss(inner, loss)

    return build


_UNET: dict[str, Any] = {
    "sample_size": IMAGE, "in_channels": CHANNELS, "out_channels": CHANNELS,
    "block_out_channels": (16, HIDDEN), "layers_per_block": 1, "norm_num_groups": 4,
}  # fmt: skip

PACKAGES = (
    ModelCase(
        "x_decoder_modern",
        _x_transformers(
            "Decoder", rotary_pos_emb=True, attn_kv_heads=2, ff_glu=True, use_rmsnorm=True
        ),
        partial(plain_text, ODD_VOCABULARY),
        samples,
    ),
    ModelCase(
        "diffusers_dit",
        _diffusers(
            "DiTTransformer2DModel", _noise, num_attention_heads=HEADS,
            attention_head_dim=HIDDEN // HEADS, in_channels=CHANNELS, out_channels=CHANNELS,
            num_layers=LAYERS, norm_num_groups=4, sample_size=IMAGE, patch_size=4,
            num_embeds_ada_norm=CLASSES,
        ),
        partial(noisy_images, CHANNELS),
        samples,
    ),
    ModelCase(
        "diffusers_unet",
        _diffusers(
            "UNet2DModel", _noise, **_UNET, attention_head_dim=8, num_class_embeds=CLASSES,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        ),
        partial(noisy_images, CHANNELS),
        samples,
    ),
    ModelCase(
        "diffusers_text_unet",
        _diffusers(
            "UNet2DConditionModel", _described_noise, **_UNET, attention_head_dim=4,
            cross_attention_dim=HIDDEN, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        ),
        partial(noisy_images, CHANNELS),
        samples,
    ),
)  # fmt: skip
