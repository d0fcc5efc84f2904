"""Vision models of transformers: patches, windows, convolutions; classes and segments."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.models import BERT_DROPOUTS, CLASSES, VIT, ModelCase, classifier, transformers_model
from benchmarks.zoo_models.batches import labelled_pixels, segments

BIG_IMAGE = 32  # for models that halve it several times
_IGNORED_PIXEL = 255
_SWIN: dict[str, Any] = {
    "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4],
    "window_size": 4,  # half the first level's grid, so that windows shift
}  # fmt: skip

VISION = (
    classifier("deit", "DeiT", BERT_DROPOUTS, **VIT),
    classifier("dinov2", "Dinov2", (*BERT_DROPOUTS, "drop_path_rate"), **VIT, mlp_ratio=2),
    classifier("beit", "Beit", (*BERT_DROPOUTS, "drop_path_rate"), **VIT,
               use_relative_position_bias=True),
    classifier("swin", "Swin", (*BERT_DROPOUTS, "drop_path_rate"), **_SWIN),
    classifier("swinv2", "Swinv2", (*BERT_DROPOUTS, "drop_path_rate"), **_SWIN),
    classifier("convnext", "ConvNext", ("drop_path_rate",), patch_size=2, num_stages=2,
               depths=[2, 2], hidden_sizes=[16, 32], layer_scale_init_value=0.5),
    classifier("poolformer", "PoolFormer", ("drop_path_rate",), image=BIG_IMAGE, depths=[2, 2],
               hidden_sizes=[16, 32], num_encoder_blocks=2, patch_sizes=[7, 3], strides=[4, 2],
               padding=[2, 1], layer_scale_init_value=0.5),
    ModelCase(
        "segformer",
        transformers_model(
            "SegformerForSemanticSegmentation",
            (*BERT_DROPOUTS, "classifier_dropout_prob", "drop_path_rate"), num_labels=CLASSES,
            num_encoder_blocks=2, depths=[2, 2], sr_ratios=[2, 1], hidden_sizes=[16, 32],
            patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[2, 4], mlp_ratios=[2, 2],
            decoder_hidden_size=16, semantic_loss_ignore_index=_IGNORED_PIXEL,
        ),
        partial(segments, BIG_IMAGE, _IGNORED_PIXEL),
        labelled_pixels(_IGNORED_PIXEL),
        running_statistics=True,
    ),
)  # fmt: skip
