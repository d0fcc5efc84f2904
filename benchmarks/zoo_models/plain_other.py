"""Models on plain `torch.nn` that are neither for text nor for images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

Result = dict[str, torch.Tensor]


class GraphNetwork(nn.Module):
    """Graph convolutions and graph attention in turn, on dense adjacencies."""

    def __init__(self, features: int, hidden: int, layers: int, classes: int) -> None:
        super().__init__()
        self.enter = nn.Linear(features, hidden)
        self.convolutions = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers))
        self.scores = nn.ModuleList(nn.Linear(hidden, 2) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(layers))
        self.head = nn.Linear(hidden, classes)

    def forward(
        self, features: torch.Tensor, adjacency: torch.Tensor, labels: torch.Tensor
    ) -> Result:
        """The mean cross-entropy over the labelled nodes."""
        x = F.elu(self.enter(features))
        for convolution, score, norm in zip(
            self.convolutions, self.scores, self.norms, strict=True
        ):
            here, there = score(x).unbind(-1)
            scores = F.leaky_relu(here[:, :, None] + there[:, None, :], 0.2)
            attention = scores.masked_fill(adjacency == 0, -torch.inf).softmax(-1)
            mixed = torch.bmm(adjacency + attention, convolution(x))
            x = norm(x + F.elu(mixed))
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class Recommender(nn.Module):
    """Embeddings of categories, their products, and perceptrons (arXiv 1906.00091)."""

    def __init__(self, fields: int, values: int, dense: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(values, hidden) for _ in range(fields))
        self.bottom = nn.Sequential(
            nn.Linear(dense, 2 * hidden), nn.ReLU(), nn.Linear(2 * hidden, hidden), nn.ReLU()
        )
        pairs = torch.tril_indices(fields + 1, fields + 1, -1)
        self.register_buffer("rows", pairs[0], persistent=False)
        self.register_buffer("columns", pairs[1], persistent=False)
        self.top = nn.Sequential(
            nn.Linear(hidden + pairs.shape[1], 2 * hidden), nn.ReLU(), nn.Dropout(dropout),
            nn.Linear(2 * hidden, 1),
        )  # fmt: skip

    def forward(
        self, categories: torch.Tensor, numbers: torch.Tensor, clicked: torch.Tensor
    ) -> Result:
        """The mean binary cross-entropy over the samples."""
        dense = self.bottom(numbers)
        rows = [table(categories[:, k]) for k, table in enumerate(self.tables)]
        stacked = torch.stack([dense, *rows], 1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        chosen = products[:, self.rows, self.columns]
        logits = self.top(torch.cat([dense, chosen], 1)).squeeze(1)
        return {"loss": F.binary_cross_entropy_with_logits(logits, clicked)}


class SoftExperts(nn.Module):
    """Layers of experts that every sample uses, weighed by a softmax gate."""

    def __init__(self, inputs: int, hidden: int, experts: int, layers: int) -> None:
        super().__init__()
        self.enter = nn.Linear(inputs, hidden)
        self.gates = nn.ModuleList(nn.Linear(hidden, experts) for _ in range(layers))
        self.wide = nn.ParameterList(
            0.1 * torch.randn(experts, hidden, 2 * hidden) for _ in range(layers)
        )
        self.narrow = nn.ParameterList(
            0.1 * torch.randn(experts, 2 * hidden, hidden) for _ in range(layers)
        )
        self.head = nn.Linear(hidden, 1)

    def forward(
        self, categories: torch.Tensor, numbers: torch.Tensor, clicked: torch.Tensor
    ) -> Result:
        """The mean squared error over the samples; the categories are not used."""
        x = self.enter(numbers)
        for gate, wide, narrow in zip(self.gates, self.wide, self.narrow, strict=True):
            weights = torch.softmax(gate(x), -1)
            inner = F.silu(torch.einsum("bi,eio->ebo", x, wide))
            x = x + torch.einsum("ebo,eoi,be->bi", inner, narrow, weights)
        return {"loss": F.mse_loss(self.head(x).squeeze(-1), clicked)}
