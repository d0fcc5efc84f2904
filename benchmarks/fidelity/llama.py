"""Llama as Megatron-like frameworks train it in eager PyTorch, and its pieces on a tp rank.

What autograd keeps there is more than a compiled step keeps: a norm written in float32 its input
and its result in that, scores of attention that are no single kernel in every form that they take,
and logits in 16 and in 32 bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpt import RECORDED_LAYERS, rank_graph
from merakc.costs.work.pieces import Piece, cut_pieces

# Attention in one kernel; as a product, a kernel of the softmax and a product; or in torch's ops.
Attention = Literal["flash", "softmax kernel", "ops"]
EPSILON = 1e-5


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The sizes of a Llama, and by which kernels it is computed."""

    hidden_size: int
    heads: int
    layers: int
    feed_forward: int
    seq_len: int
    vocab: int
    attention: Attention = "flash"
    norm_kernel: bool = True

    def block_bytes(self, micro_batch: int, tp: int, *, sequence_parallel: bool) -> int:
        """What autograd keeps of a block beyond what a compiled step does."""
        tokens, kept = micro_batch * self.seq_len, 0
        if not self.norm_kernel:  # two norms: the input and the result, both in float32, less one
            width = self.hidden_size // (tp if sequence_parallel else 1)
            kept += 2 * tokens * width * (4 + 4 - 2)
        if self.attention != "flash":
            scores = micro_batch * self.heads // tp * self.seq_len**2
            kept += scores * (2 if self.attention == "softmax kernel" else 4)
        return kept

    def head_bytes(self, micro_batch: int, tp: int) -> int:
        """What the loss holds in its backward beyond a rank's log-probabilities.

        These runs gathered their logits over tp (Aleph-Alpha/scaling, `ColumnParallelLinear` and
        `CrossEntropyLoss`): whole log-probabilities and two gradients, in float32.
        """
        scores = micro_batch * self.seq_len * self.vocab
        return scores * (4 + 4 + 4) - 4 * scores // tp


class Block(nn.Module):
    """One layer. x is [batch, seq, hidden]."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        h, f = shape.hidden_size, shape.feed_forward
        self.heads, self.attention = shape.heads, shape.attention
        self.norm_1, self.norm_2 = nn.RMSNorm(h, EPSILON), nn.RMSNorm(h, EPSILON)
        self.q, self.k, self.v, self.o = (nn.Linear(h, h, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(h, f, bias=False), nn.Linear(h, f, bias=False)
        self.down = nn.Linear(f, h, bias=False)

    def forward(self, x: Tensor, turns: Tensor, future: Tensor) -> Tensor:
        """`turns` [2, seq, width] are cosines and sines, `future` [seq, seq] what is to come."""
        b, s, h = x.shape
        y = self.norm_1(x)
        q, k, v = (
            of(y).view(b, s, self.heads, h // self.heads).transpose(1, 2)
            for of in (self.q, self.k, self.v)
        )
        q, k = turned(q, turns), turned(k, turns)
        if self.attention == "flash":
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
            mixed = torch.softmax(scores.masked_fill(future, -1e4), -1) @ v
        x = x + self.o(mixed.transpose(1, 2).reshape(b, s, h))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def turned(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary positions (arXiv 2104.09864) of [batch, heads, seq, width]."""
    first, second = x.chunk(2, -1)
    return x * turns[0] + torch.cat([-second, first], -1) * turns[1]


class Llama(nn.Module):
    """The head has a table of its own."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        h, s = shape.hidden_size, shape.seq_len
        self.words = nn.Embedding(shape.vocab, h)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(h, EPSILON)
        self.head = nn.Linear(h, shape.vocab, bias=False)
        self.register_buffer("turns", torch.ones(2, s, h // shape.heads), persistent=False)
        future = torch.ones(s, s, dtype=torch.bool).triu(1)
        self.register_buffer("future", future, persistent=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy of `labels`, like `ids` [batch, seq], each for its position."""
        x = self.words(ids)
        for block in self.blocks:
            x = block(x, self.turns, self.future)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


@cache
def llama_pieces(
    shape: LlamaShape, micro_batch: int, tp: int, *, sequence_parallel: bool = False
) -> tuple[Piece, ...]:
    """The pieces of all layers in bfloat16, from a recording of three of them."""
    few = replace(shape, layers=RECORDED_LAYERS)
    ids = torch.zeros(micro_batch, shape.seq_len, dtype=torch.long)
    graph = rank_graph(lambda: Llama(few), ids, tp, sequence_parallel=sequence_parallel)
    before, *blocks, after = cut_pieces(graph, fused=True)
    more = shape.block_bytes(micro_batch, tp, sequence_parallel=sequence_parallel)
    first, middle, last = (replace(b, saved_bytes=b.saved_bytes + more) for b in blocks)
    head_bytes = after.saved_bytes + shape.head_bytes(micro_batch, tp)
    after = replace(after, saved_bytes=head_bytes)
    return before, first, *[middle] * (shape.layers - 2), last, after
