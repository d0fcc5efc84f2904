"""Vision models on plain `torch.nn`, as people write them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

Result = dict[str, torch.Tensor]


class MixerBlock(nn.Module):
    """Mixes patches, then channels (Tolstikhin et al. 2021, arXiv 2105.01601)."""

    def __init__(self, patches: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.tokens = _mlp(patches, 2 * patches, dropout)
        self.channels = _mlp(hidden, 2 * hidden, dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[batch, patches, hidden]` to the same."""
        x = x + self.tokens(self.norm1(x).mT).mT
        return x + self.channels(self.norm2(x))


def _mlp(width: int, wide: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, wide), nn.GELU(), nn.Dropout(dropout), nn.Linear(wide, width)
    )


class MLPMixer(nn.Module):
    """A classifier of perceptrons alone."""

    def __init__(self, image: int, patch: int, hidden: int, layers: int, classes: int,
                 dropout: float) -> None:  # fmt: skip
        super().__init__()
        self.patches = nn.Conv2d(3, hidden, patch, patch)
        count = (image // patch) ** 2
        self.blocks = nn.Sequential(*(MixerBlock(count, hidden, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, classes)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> Result:
        """The mean cross-entropy over the images."""
        x = self.blocks(self.patches(pixel_values).flatten(2).transpose(1, 2))
        logits = self.head(self.norm(x).mean(1))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Autoencoder(nn.Module):
    """Strided convolutions down, transposed convolutions up, a dense bottleneck."""

    def __init__(self, image: int, width: int, code: int) -> None:
        super().__init__()
        side = image // 4
        self.shape = (2 * width, side, side)
        self.down = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(width, 2 * width, 4, 2, 1),
            nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(math.prod(self.shape), code),
        )  # fmt: skip
        self.grow = nn.Linear(code, math.prod(self.shape))
        self.up = nn.Sequential(
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> Result:
        """The mean squared error of the image made again; the classes are not used."""
        code = self.down(pixel_values)
        made = self.up(F.leaky_relu(self.grow(code)).unflatten(1, self.shape))
        return {"loss": F.mse_loss(made, pixel_values), "code": code}


class UNet(nn.Module):
    """Two levels down and up with skips; a class for each pixel (arXiv 1505.04597)."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.enter = self._double(3, width)
        self.down = self._double(width, 2 * width)
        self.bottom = self._double(2 * width, 4 * width)
        self.up1 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.join1 = self._double(4 * width, 2 * width)
        self.up2 = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.join2 = self._double(3 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    @staticmethod
    def _double(inputs: int, outputs: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for channels in (inputs, outputs):
            layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False),
                       nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]  # fmt: skip
        return nn.Sequential(*layers)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> Result:
        """The mean cross-entropy over the labelled pixels."""
        high = self.enter(pixel_values)
        middle = self.down(F.max_pool2d(high, 2))
        x = self.up1(self.bottom(F.max_pool2d(middle, 2)))
        x = self.up2(self.join1(torch.cat([middle, x], 1)))
        logits = self.head(self.join2(torch.cat([high, x], 1)))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class DiTBlock(nn.Module):
    """A transformer block whose norms are shifted and scaled by the condition (adaLN-Zero)."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden, elementwise_affine=False, eps=1e-6)
        self.attention = nn.MultiheadAttention(hidden, heads, dropout, batch_first=True)
        self.norm2 = nn.LayerNorm(hidden, elementwise_affine=False, eps=1e-6)
        self.mlp = _mlp(hidden, 2 * hidden, dropout)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden, 6 * hidden))

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        """`x` `[batch, patches, hidden]`, `condition` `[batch, hidden]`."""
        parts = self.modulation(condition).unsqueeze(1).chunk(6, dim=-1)
        shift1, scale1, gate1, shift2, scale2, gate2 = parts
        y = self.norm1(x) * (1 + scale1) + shift1
        x = x + gate1 * self.attention(y, y, y, need_weights=False)[0]
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    """A diffusion transformer (Peebles and Xie, arXiv 2212.09748)."""

    def __init__(self, image: int, channels: int, patch: int, hidden: int, heads: int, layers: int,
                 classes: int, dropout: float) -> None:  # fmt: skip
        super().__init__()
        self.channels, self.patch, self.side = channels, patch, image // patch
        self.hidden = hidden
        self.patches = nn.Conv2d(channels, hidden, patch, patch)
        self.position = nn.Parameter(0.02 * torch.randn(1, self.side**2, hidden))
        self.time = nn.Sequential(nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        self.classes = nn.Embedding(classes, hidden)
        self.blocks = nn.ModuleList(DiTBlock(hidden, heads, dropout) for _ in range(layers))
        self.head = nn.Linear(hidden, patch * patch * channels)

    def forward(self, sample: torch.Tensor, timestep: torch.Tensor, class_labels: torch.Tensor,
                target: torch.Tensor) -> Result:  # fmt: skip
        """The mean squared error of the predicted noise."""
        half = self.hidden // 2
        rates = torch.exp(-math.log(10000.0) * torch.arange(half, device=sample.device) / half)
        angles = timestep[:, None].to(sample.dtype) * rates.to(sample.dtype)
        waves = torch.cat([angles.cos(), angles.sin()], -1)
        condition = self.time(waves) + self.classes(class_labels)
        x = self.patches(sample).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x = block(x, condition)
        x = self.head(x).unflatten(-1, (self.patch, self.patch, self.channels))
        x = x.unflatten(1, (self.side, self.side))
        made = torch.einsum("nhwpqc->nchpwq", x).reshape(sample.shape)
        return {"loss": F.mse_loss(made, target)}
