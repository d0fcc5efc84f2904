"""The families of timm and torchvision on plain `torch.nn`: one small member of each."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

Result = dict[str, torch.Tensor]


class Classifier(nn.Module):
    """Features of an image `[batch, channels, height, width]`, averaged, and their class."""

    def __init__(self, features: nn.Module, width: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.features = features
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(width, classes)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> Result:
        """The mean cross-entropy over the images, with smoothed labels."""
        x = F.adaptive_avg_pool2d(self.features(pixel_values), 1).flatten(1)
        logits = self.head(self.dropout(x))
        return {"loss": F.cross_entropy(logits, labels, label_smoothing=0.1), "logits": logits}


def conv(inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1,
         act: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:  # fmt: skip
    """A convolution, BatchNorm and an activation."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs), act(),
    )  # fmt: skip


class Dense(nn.Module):
    """Layers that read all that came before (Huang et al., arXiv 1608.06993)."""

    def __init__(self, inputs: int, growth: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(1, inputs + k * growth), nn.ReLU(),
                          nn.Conv2d(inputs + k * growth, growth, 3, padding=1))
            for k in range(layers)
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[batch, inputs, h, w]` to `[batch, inputs + layers * growth, h, w]`."""
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return x


class Fire(nn.Module):
    """Squeezed, then expanded by two kernels (SqueezeNet, arXiv 1602.07360)."""

    def __init__(self, inputs: int, squeezed: int, outputs: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(inputs, squeezed, 1)
        self.one = nn.Conv2d(squeezed, outputs // 2, 1)
        self.three = nn.Conv2d(squeezed, outputs // 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[batch, inputs, h, w]` to `[batch, outputs, h, w]`."""
        x = F.relu(self.squeeze(x), inplace=True)
        return torch.cat([F.relu(self.one(x)), F.relu(self.three(x))], 1)


class Shuffle(nn.Module):
    """Half of the channels pass, and all are shuffled (ShuffleNet V2, arXiv 1807.11164)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        self.branch = nn.Sequential(conv(half, half), conv(half, half, 3, groups=half, act=nn.Identity), conv(half, half))  # fmt: skip  # noqa: E501

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[batch, width, h, w]` to the same."""
        kept, changed = x.chunk(2, dim=1)
        x = torch.cat((kept, self.branch(changed)), 1)
        n, c, h, w = x.shape
        return x.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, c, h, w)


class Inception(nn.Module):
    """Four branches side by side (GoogLeNet, arXiv 1409.4842)."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList([
            conv(inputs, width), nn.Sequential(conv(inputs, width), conv(width, width, 3)),
            nn.Sequential(conv(inputs, width), conv(width, width, 5)),
            nn.Sequential(nn.MaxPool2d(3, 1, 1), conv(inputs, width)),
        ])  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[batch, inputs, h, w]` to `[batch, 4 * width, h, w]`."""
        return torch.cat([branch(x) for branch in self.branches], 1)


class Ghost(nn.Module):
    """Half of the channels are cheap images of the others (arXiv 1911.11907)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.primary = conv(inputs, outputs // 2)
        self.cheap = conv(outputs // 2, outputs // 2, 3, groups=outputs // 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[batch, inputs, h, w]` to `[batch, outputs, h, w]`."""
        made = self.primary(x)
        return torch.cat([made, self.cheap(made)], dim=1)


class Standardised(nn.Conv2d):
    """A convolution whose kernels are standardised, in place of norms (NFNet, arXiv 2102.06171)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[batch, in, h, w]` to `[batch, out, h, w]`."""
        deviation, mean = torch.std_mean(self.weight, dim=(1, 2, 3), keepdim=True)
        weight = (self.weight - mean) / (deviation * self.weight[0].numel() ** 0.5 + 1e-5)
        return F.relu(x + self._conv_forward(x, weight, self.bias))


class Reparametrised(nn.Module):
    """Three branches that are one convolution in the end (RepVGG, arXiv 2101.03697)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.three, self.one = conv(width, width, 3, act=nn.Identity), conv(width, width, act=nn.Identity)  # fmt: skip  # noqa: E501
        self.same = nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[batch, width, h, w]` to the same."""
        return F.relu(self.three(x) + self.one(x) + self.same(x))


class CrossCovariance(nn.Module):
    """Attention between channels, and a convolution between places (XCiT, arXiv 2106.09681)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv = nn.GroupNorm(1, width), nn.Conv2d(width, 3 * width, 1)
        self.scale = nn.Parameter(torch.ones(heads, 1, 1))
        self.project = nn.Conv2d(width, width, 1)
        self.local = nn.Conv2d(width, width, 3, padding=1, groups=width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[batch, width, h, w]` to the same."""
        n, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(n, 3, self.heads, -1, h * w).unbind(1)
        weights = (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * self.scale).softmax(-1)
        x = x + self.project((weights @ v).reshape(n, c, h, w))
        return x + F.gelu(self.local(x))


class WindowsAndGrid(nn.Module):
    """Attention within windows, then over a grid of all (MaxViT, arXiv 2204.01697)."""

    def __init__(self, width: int, heads: int, window: int) -> None:
        super().__init__()
        self.window = window
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attentions = nn.ModuleList(
            nn.MultiheadAttention(width, heads, batch_first=True) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[batch, width, h, w]` to the same."""
        n, c, h, w = x.shape
        s = self.window
        for k, (norm, attention) in enumerate(zip(self.norms, self.attentions, strict=True)):
            shape = (n, c, h // s, s, w // s, s) if k == 0 else (n, c, s, h // s, s, w // s)
            order = (0, 2, 4, 3, 5, 1) if k == 0 else (0, 3, 5, 2, 4, 1)
            parts = x.reshape(shape).permute(order)
            rows = norm(parts.reshape(-1, s * s, c))
            made = attention(rows, rows, rows, need_weights=False)[0].reshape(parts.shape)
            back = (0, 5, 1, 3, 2, 4) if k == 0 else (0, 5, 3, 1, 4, 2)
            x = x + made.permute(back).reshape(n, c, h, w)
        return x


class SpatialGate(nn.Module):
    """Half of the channels gate the others, by places (gMLP, arXiv 2105.08050)."""

    def __init__(self, width: int, places: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(places, places)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[batch, width, h, w]` to the same."""
        rows = x.flatten(2).transpose(1, 2)
        kept, gate = F.gelu(self.enter(rows)).chunk(2, -1)
        gate = self.mix(self.norm(gate).transpose(1, 2)).transpose(1, 2)
        return x + self.leave(kept * gate).transpose(1, 2).reshape(x.shape)
