"""The two plain models: shapes, and blocks that really are residual."""

from __future__ import annotations

import torch

from benchmarks.plain_models import ResidualBlock, ResNet, TransformerEncoder


def test_encoder_ignores_padding_and_missing_labels() -> None:
    torch.manual_seed(0)
    model = TransformerEncoder(13, 6, 8, 2, 16, 2, 0.0)
    ids = torch.randint(0, 13, (2, 6))
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    labels = ids.masked_fill(mask == 0, -100)
    out = model(ids, mask, labels)
    assert out["logits"].shape == (2, 6, 13)
    changed = ids.clone()
    changed[0, 4:] = (changed[0, 4:] + 1) % 13
    assert torch.equal(model(changed, mask, labels)["loss"], out["loss"])


def test_residual_block_is_its_shortcut_where_its_branch_is_zero() -> None:
    block = ResidualBlock(4, 4, 1)
    torch.nn.init.zeros_(block.norm2.weight)
    x = torch.randn(2, 4, 5, 5)
    assert torch.equal(block(x.clone()), x.relu())


def test_resnet_shapes() -> None:
    model = ResNet(width=4, blocks=(1, 2), classes=3, dropout=0.0)
    out = model(torch.randn(2, 3, 8, 8), torch.tensor([0, 2]))
    assert out["logits"].shape == (2, 3)
    assert len(model.blocks) == 3
    assert model.blocks[1](torch.randn(2, 4, 8, 8)).shape == (2, 8, 4, 4)
