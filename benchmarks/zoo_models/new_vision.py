"""Vision models of transformers: convolutions of all families, pyramids, detection, depth."""

from __future__ import annotations

from functools import partial

import torch
import transformers
from torch import nn

from benchmarks.models import (
    BERT_DROPOUTS,
    CLASSES,
    HEADS,
    HIDDEN,
    IMAGE,
    VIT,
    WIDE,
    Batch,
    ModelCase,
    classifier,
    transformers_model,
    unshifted,
)
from benchmarks.plain_models import Around
from benchmarks.zoo_models.batches import samples
from benchmarks.zoo_models.vision import BIG_IMAGE
from merakc.frontend.opaque import default_dtype

_VIDEO_FRAMES = 4


def _videos(batch_size: int, generator: torch.Generator) -> Batch:
    """Videos `[batch, frames, 3, height, width]` and their classes."""
    shape = (batch_size, _VIDEO_FRAMES, 3, IMAGE, IMAGE)
    return {
        "pixel_values": torch.randn(shape, generator=generator),
        "labels": torch.randint(0, CLASSES, (batch_size,), generator=generator),
    }


def _hidden_patches(batch_size: int, generator: torch.Generator) -> Batch:
    """Images, and the numbers by which their patches are shuffled."""
    return {
        "pixel_values": torch.randn(batch_size, 3, IMAGE, IMAGE, generator=generator),
        "noise": torch.rand(batch_size, (IMAGE // 4) ** 2, generator=generator),
    }


class Boxes(Around):
    """A detector that is given one box an image as tensors, and its labels as they want them."""

    def forward(
        self, pixel_values: torch.Tensor, classes: torch.Tensor, boxes: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """The loss of the boxes, matched to the queries of each image."""
        labels = [{"class_labels": c, "boxes": b} for c, b in zip(classes, boxes, strict=True)]
        with default_dtype(pixel_values.dtype):  # in which the loss makes its tables
            return {"loss": self.inner(pixel_values=pixel_values, labels=labels).loss}


def _boxes(image: int, batch_size: int, generator: torch.Generator) -> Batch:
    centres = 0.3 + 0.4 * torch.rand(batch_size, 2, 2, generator=generator)
    sizes = 0.1 + 0.2 * torch.rand(batch_size, 2, 2, generator=generator)
    return {
        "pixel_values": torch.randn(batch_size, 3, image, image, generator=generator),
        "classes": torch.randint(0, CLASSES, (batch_size, 2), generator=generator),
        "boxes": torch.cat([centres, sizes], -1),
    }


def _detr(dropout: float) -> nn.Module:
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic",
        out_features=["stage2"],
    )  # fmt: skip
    config = transformers.DetrConfig(
        use_timm_backbone=False, backbone_config=backbone, num_labels=CLASSES, num_queries=6,
        d_model=HIDDEN, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=WIDE,
        decoder_ffn_dim=WIDE, encoder_attention_heads=HEADS, decoder_attention_heads=HEADS,
        dropout=dropout,
    )  # fmt: skip
    return Boxes(transformers.DetrForObjectDetection(config))


def _yolos(dropout: float) -> nn.Module:
    config = transformers.YolosConfig(
        **VIT, image_size=[IMAGE, IMAGE], num_labels=CLASSES, num_detection_tokens=6,
        use_mid_position_embeddings=True, **dict.fromkeys(BERT_DROPOUTS, dropout),
    )  # fmt: skip
    return Boxes(transformers.YolosForObjectDetection(config))


NEW_VISION = (
    classifier("convnextv2", "ConvNextV2", ("drop_path_rate",), patch_size=2, num_stages=2,
               depths=[2, 2], hidden_sizes=[16, 32]),
    classifier("regnet", "RegNet", image=BIG_IMAGE, embedding_size=8, hidden_sizes=[8, 16],
               depths=[2, 2], groups_width=4, running_statistics=True),
    classifier("mobilenet_v2", "MobileNetV2", ("classifier_dropout_prob",), image=BIG_IMAGE,
               depth_multiplier=0.1, depth_divisible_by=4, min_depth=4, running_statistics=True),
    classifier("efficientnet", "EfficientNet", ("dropout_rate", "drop_connect_rate"),
               image=BIG_IMAGE, width_coefficient=0.1, depth_coefficient=0.1, depth_divisor=4,
               hidden_dim=128, running_statistics=True),
    classifier("mobilevit", "MobileViT",
               ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout_prob"),
               image=2 * BIG_IMAGE, patch_size=2, hidden_sizes=[16, 24, 32],
               neck_hidden_sizes=[4, 8, 8, 16, 16, 16, 32], num_attention_heads=4,
               initializer_range=0.2, running_statistics=True),
    classifier("levit", "Levit", image=3 * BIG_IMAGE, hidden_sizes=[16, 24, 32],
               num_attention_heads=[2, 3, 4], depths=[1, 1, 1], key_dim=[8, 8, 8], patch_size=16,
               kernel_size=3, stride=2, padding=1, drop_path_rate=0, running_statistics=True),
    classifier("cvt", "Cvt", image=BIG_IMAGE, embed_dim=[16, 32],
               num_heads=[2, 4], depth=[1, 2], patch_sizes=[7, 3], patch_stride=[4, 2],
               patch_padding=[2, 1], drop_rate=[0.0, 0.0], drop_path_rate=[0.0, 0.0],
               attention_drop_rate=[0.0, 0.0], mlp_ratio=[2.0, 2.0], qkv_bias=[True, True],
               cls_token=[False, True], qkv_projection_method=["dw_bn", "dw_bn"],
               kernel_qkv=[3, 3], padding_kv=[1, 1], stride_kv=[2, 2], padding_q=[1, 1],
               stride_q=[1, 1], running_statistics=True),
    classifier("pvt_v2", "PvtV2", (*BERT_DROPOUTS, "drop_path_rate"), image=BIG_IMAGE,
               num_encoder_blocks=2, depths=[1, 2], sr_ratios=[2, 1], hidden_sizes=[16, 32],
               patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[2, 4], mlp_ratios=[2, 2]),
    classifier("focalnet", "FocalNet", ("hidden_dropout_prob", "drop_path_rate"), patch_size=2,
               embed_dim=16, hidden_sizes=[16, 32], depths=[2, 2], focal_levels=[2, 2],
               focal_windows=[3, 3], mlp_ratio=2.0),
    classifier("swiftformer", "SwiftFormer", ("drop_mlp_rate", "drop_conv_encoder_rate",
               "drop_path_rate"), image=BIG_IMAGE, depths=[1, 1], embed_dims=[16, 32], mlp_ratio=2,
               downsamples=[True, True], layer_scale_init_value=0.5, running_statistics=True),
    classifier("hiera", "Hiera", ("drop_path_rate",), image=BIG_IMAGE,
               image_size=[BIG_IMAGE, BIG_IMAGE], patch_size=[7, 7],
               patch_stride=[4, 4], patch_padding=[3, 3], embed_dim=16, depths=[2, 2],
               num_heads=[1, 2], embed_dim_multiplier=2.0, num_query_pool=1, query_stride=[2, 2],
               masked_unit_size=[4, 4], masked_unit_attention=[True, False], mlp_ratio=2.0),
    ModelCase(
        "vit_mae",
        transformers_model("ViTMAEForPreTraining", BERT_DROPOUTS, image_size=IMAGE,
                           decoder_num_attention_heads=HEADS, decoder_hidden_size=16,
                           decoder_num_hidden_layers=2, decoder_intermediate_size=32,
                           mask_ratio=0.5, **VIT),
        _hidden_patches,
        samples,
    ),
    ModelCase(
        "timesformer",
        transformers_model("TimesformerForVideoClassification", BERT_DROPOUTS, image_size=IMAGE,
                           drop_path_rate=0, num_frames=_VIDEO_FRAMES, num_labels=CLASSES, **VIT),
        _videos,
        unshifted,
    ),
    ModelCase(
        "videomae",
        transformers_model("VideoMAEForVideoClassification", BERT_DROPOUTS,
                           image_size=IMAGE, num_frames=_VIDEO_FRAMES, tubelet_size=2,
                           num_labels=CLASSES, **VIT),
        _videos,
        unshifted,
    ),
    ModelCase("detr", _detr, partial(_boxes, BIG_IMAGE), samples),
    ModelCase("yolos", _yolos, partial(_boxes, IMAGE), samples),
)  # fmt: skip
