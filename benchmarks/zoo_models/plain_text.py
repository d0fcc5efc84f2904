"""Sequence models on plain `torch.nn`, as people write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

Result = dict[str, torch.Tensor]


def next_word_loss(logits: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of `logits` `[batch, t, vocabulary]` with the words `[batch, t + 1]`."""
    return F.cross_entropy(logits.flatten(0, 1), input_ids[:, 1:].flatten())


class Translator(nn.Module):
    """`nn.Transformer`, with tied target embedding and head."""

    def __init__(
        self, vocabulary: int, length: int, hidden: int, heads: int, layers: int, dropout: float
    ) -> None:
        super().__init__()
        self.source = nn.Embedding(vocabulary, hidden)
        self.target = nn.Embedding(vocabulary, hidden)
        self.position = nn.Embedding(length, hidden)
        self.transformer = nn.Transformer(
            hidden, heads, layers, layers, 2 * hidden, dropout, batch_first=True
        )
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.head.weight = self.target.weight

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
    ) -> Result:
        """The mean cross-entropy over the labels that are not -100."""
        begin = torch.ones_like(labels[:, :1])
        shifted = torch.cat([begin, labels[:, :-1].clamp(min=0)], 1)
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        source = self.source(input_ids) + self.position(places)
        target = self.target(shifted) + self.position(places[: shifted.shape[1]])
        padding = attention_mask == 0
        causal = nn.Transformer.generate_square_subsequent_mask(shifted.shape[1])
        out = self.transformer(
            source, target, tgt_mask=causal.to(source), src_key_padding_mask=padding,
            memory_key_padding_mask=padding, tgt_is_causal=True,
        )  # fmt: skip
        loss = F.cross_entropy(self.head(out).flatten(0, 1), labels.flatten())
        return {"loss": loss}


class LSTMLanguageModel(nn.Module):
    """Two LSTMs of two layers each, one after the other."""

    def __init__(self, vocabulary: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.lower = nn.LSTM(hidden, hidden, 2, batch_first=True, dropout=dropout)
        self.upper = nn.LSTM(hidden, hidden, 2, batch_first=True, dropout=dropout)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, input_ids: torch.Tensor) -> Result:
        """The mean cross-entropy of each next word."""
        x, _ = self.lower(self.embedding(input_ids[:, :-1]))
        x, _ = self.upper(self.dropout(x))
        return {"loss": next_word_loss(self.head(x), input_ids)}


class CausalConvolutions(nn.Module):
    """A WaveNet: dilated causal convolutions with gates, residuals and skips."""

    def __init__(self, vocabulary: int, hidden: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.convolutions = nn.ModuleList(
            nn.Conv1d(hidden, 2 * hidden, 2, dilation=2**k) for k in range(layers)
        )
        self.mixes = nn.ModuleList(nn.Conv1d(hidden, hidden, 1) for _ in range(layers))
        self.dropout = dropout
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, input_ids: torch.Tensor) -> Result:
        """The mean cross-entropy of each next word."""
        x = self.embedding(input_ids[:, :-1]).transpose(1, 2)
        skips = torch.zeros_like(x)
        for k, (convolution, mix) in enumerate(zip(self.convolutions, self.mixes, strict=True)):
            value, gate = convolution(F.pad(x, (2**k, 0))).chunk(2, dim=1)
            y = mix(torch.tanh(value) * torch.sigmoid(gate))
            skips = skips + y
            x = x + F.dropout(y, self.dropout, self.training)
        return {"loss": next_word_loss(self.head(F.relu(skips).transpose(1, 2)), input_ids)}


class PackedBlock(nn.Module):
    """A block in the style of minimal GPTs: one matrix for query, key and value."""

    def __init__(self, hidden: int, heads: int, length: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.norm2 = nn.LayerNorm(hidden)
        self.mlp = nn.Sequential(
            nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden),
            nn.Dropout(dropout),
        )  # fmt: skip
        self.register_buffer("mask", torch.tril(torch.ones(length, length)), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[batch, t, hidden]` to the same."""
        batch, length, hidden = x.shape
        parts = self.qkv(self.norm1(x)).split(hidden, dim=2)
        query, key, value = (
            part.view(batch, length, self.heads, hidden // self.heads).transpose(1, 2)
            for part in parts
        )
        scores = query @ key.transpose(-2, -1) * (hidden // self.heads) ** -0.5
        scores = scores.masked_fill(self.mask[:length, :length] == 0, float("-inf"))
        mixed = (F.softmax(scores, dim=-1) @ value).transpose(1, 2).contiguous()
        x = x + self.out(mixed.view(batch, length, hidden))
        return x + self.mlp(self.norm2(x))


class MinimalGPT(nn.Module):
    """Blocks with packed projections, written-out attention and a tied head."""

    def __init__(
        self, vocabulary: int, length: int, hidden: int, heads: int, layers: int, dropout: float
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, hidden)
        self.position = nn.Parameter(0.02 * torch.randn(1, length, hidden))
        self.blocks = nn.Sequential(
            *(PackedBlock(hidden, heads, length, dropout) for _ in range(layers))
        )
        self.norm = nn.LayerNorm(hidden)

    def forward(self, input_ids: torch.Tensor) -> Result:
        """The mean cross-entropy of each next word."""
        inputs = input_ids[:, :-1]
        x = self.words(inputs) + self.position[:, : inputs.shape[1]]
        logits = F.linear(self.norm(self.blocks(x)), self.words.weight)
        return {"loss": next_word_loss(logits, input_ids)}
