"""Two models written on plain `torch.nn`, without transformers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Around(nn.Module):
    """A model around another one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


class TransformerEncoder(nn.Module):
    """`nn.TransformerEncoder` between an embedding and a head over the words.

    `input_ids`, `attention_mask` and `labels` are `[batch, sequence]`.
    """

    def __init__(
        self,
        vocabulary: int,
        sequence: int,
        hidden: int,
        heads: int,
        wide: int,
        layers: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.position = nn.Parameter(0.02 * torch.randn(sequence, hidden))
        layer = nn.TransformerEncoderLayer(hidden, heads, wide, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """The mean cross-entropy over the labels that are not -100, and the logits."""
        x = self.embedding(input_ids) + self.position[: input_ids.shape[1]]
        logits = self.head(self.encoder(x, src_key_padding_mask=attention_mask == 0))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm around a residual, with in-place ops."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = (
            nn.Identity()
            if stride == 1 and inputs == outputs
            else nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[batch, inputs, height, width]` to `[batch, outputs, height/stride, width/stride]`."""
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = self.norm2(self.conv2(y))
        y += self.shortcut(x)
        return F.relu(y, inplace=True)


class ResNet(nn.Module):
    """A small residual network for `[batch, 3, height, width]` images."""

    def __init__(self, width: int, blocks: tuple[int, ...], classes: int, dropout: float) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        self.blocks = nn.Sequential()
        channels = width
        for level, count in enumerate(blocks):
            for k in range(count):
                outputs = width * 2**level
                stride = 2 if level and k == 0 else 1
                self.blocks.append(ResidualBlock(channels, outputs, stride))
                channels = outputs
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(channels, classes)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The mean cross-entropy over the images, and the logits `[batch, classes]`."""
        x = self.blocks(self.stem(pixel_values))
        logits = self.head(self.dropout(F.adaptive_avg_pool2d(x, 1).flatten(1)))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}
