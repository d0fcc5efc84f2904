"""GPT as Megatron-LM trains it, in plain modules, and its pieces on a tp rank.

The block of Narayanan et al. 2021 (arXiv 2104.04473) and Korthikanti et al. 2022 (arXiv
2205.05198, figure 2): dropout keeps its mask, and attention is a softmax between two products.
With `attention="fused"` it is one kernel and nothing is dropped, as in Megatron-Core.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from merakc.costs.work.pieces import Piece, cut_pieces
from merakc.ir.batches import BatchLayout
from merakc.ir.graph import Graph
from merakc.lowering.lowered import TRAINING
from merakc.lowering.recording import record_part
from merakc.passes.batches.recorded import in_parts
from merakc.passes.sharding.shard import shard
from merakc.passes.sharding.spmd import spmd_partition

Attention = Literal["parts", "fused"]
DROPPED = 0.1
# The first and the last block hand on other values than those between.
RECORDED_LAYERS = 3


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a GPT, and how it is written."""

    hidden_size: int
    heads: int
    layers: int
    seq_len: int
    vocab: int
    attention: Attention = "parts"


def drop(x: Tensor) -> Tensor:
    """Dropout that keeps its mask for the backward, a byte an element."""
    kept = torch.rand_like(x) > DROPPED
    return x * kept * (1.0 / (1.0 - DROPPED))


class Block(nn.Module):
    """One layer. x is [batch, seq, hidden]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        h = shape.hidden_size
        self.heads, self.attention = shape.heads, shape.attention
        self.norm_1, self.norm_2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.out = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x: Tensor, future: Tensor) -> Tensor:
        """`future` [seq, seq] says which positions are yet to come."""
        b, s, h = x.shape
        qkv = self.qkv(self.norm_1(x)).view(b, s, self.heads, 3, h // self.heads)
        q, k, v = qkv.transpose(1, 2).unbind(3)
        mixed = self.attend(q, k, v, future).transpose(1, 2).reshape(b, s, h)
        x = x + self.drop(self.out(mixed))
        return x + self.drop(self.down(F.gelu(self.up(self.norm_2(x)))))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, future: Tensor) -> Tensor:
        """Causal attention of [batch, heads, seq, width] each."""
        if self.attention == "fused":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        return self.drop(torch.softmax(scores.masked_fill(future, -1e4), -1)) @ v

    def drop(self, x: Tensor) -> Tensor:
        """Dropout, where this kind of GPT has it."""
        return drop(x) if self.attention == "parts" else x


class GPT(nn.Module):
    """Learned positions; the head shares the embedding's table."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.vocab, shape.hidden_size)
        self.places = nn.Parameter(torch.empty(shape.seq_len, shape.hidden_size))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden_size)
        future = torch.ones(shape.seq_len, shape.seq_len, dtype=torch.bool).triu(1)
        self.register_buffer("future", future, persistent=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy of `labels`, like `ids` [batch, seq], each for its position."""
        x = self.words(ids) + self.places
        for block in self.blocks:
            x = block(x, self.future)
        logits = F.linear(self.norm(x), self.words.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


@cache
def gpt_graph(shape: Shape, micro_batch: int, tp: int, *, sequence_parallel: bool = False) -> Graph:
    """The forward of a tp rank in bfloat16."""
    ids = torch.zeros(micro_batch, shape.seq_len, dtype=torch.long)
    return rank_graph(lambda: GPT(shape), ids, tp, sequence_parallel=sequence_parallel)


def rank_graph(
    make: Callable[[], nn.Module], ids: Tensor, tp: int, *, sequence_parallel: bool
) -> Graph:
    """The forward in bfloat16 of a tp rank, of a model that takes ids and labels, for a micro-batch
    of several.
    """
    with torch.device("meta"):
        model = make().to(torch.bfloat16)
    layout = BatchLayout((len(ids), len(ids)), 1)  # one part of several
    recording = record_part(model, (ids, ids), {}, layout, torch.device("cpu"))
    graph = in_parts(recording, layout.parts, TRAINING).graph
    return spmd_partition(graph, shard(graph, tp, sequence_parallel=sequence_parallel), 0)


@cache
def gpt_pieces(
    shape: Shape, micro_batch: int, tp: int, *, sequence_parallel: bool = False
) -> tuple[Piece, ...]:
    """The pieces of all layers, from a recording of three of them."""
    few = replace(shape, layers=RECORDED_LAYERS)
    graph = gpt_graph(few, micro_batch, tp, sequence_parallel=sequence_parallel)
    before, first, middle, last, after = cut_pieces(graph, fused=True)
    return before, first, *[middle] * (shape.layers - 2), last, after
