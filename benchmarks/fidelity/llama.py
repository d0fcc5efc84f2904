"""Llama as Megatron-like frameworks train it in eager PyTorch, and its pieces on a tp rank.

What autograd keeps there is more than a compiled step keeps: a norm written in float32 its input
and its result in that, scores of attention that are no single kernel in every form that they take,
and logits in 16 and in 32 bits. Each call of torch is a kernel that reads and writes memory; which
calls a norm, turned queries and keys, a gate and scores make is assumed: the usual ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpt import RECORDED_LAYERS, rank_graph
from merakc.costs.work.kernels import Kernel, KernelKind, Work
from merakc.costs.work.pieces import Piece, cut_pieces

# Attention in one kernel, of FlashAttention 2 or 1; as a product, a kernel of the softmax and a
# product; or in torch's ops.
Attention = Literal["flash", "flash 1", "softmax kernel", "ops"]
EPSILON = 1e-5
# Bytes of an element that a norm in torch's ops reads and writes, call by call: `x.float()`, its
# square, the mean of that, times its inverse root, back to 16 bits. That times the weights is what
# a kernel of the whole norm reads and writes.
NORM_FORWARD = (6, 8, 4, 8, 6)
# The backwards of all of these, less what a kernel of the whole one does: of the weights and what
# they are multiplied with, of the cast, the product, the inverse root and the mean, the sum of the
# gradients of x, which is read twice, and the first cast.
NORM_BACKWARD = (4, 4, 6, 12, 16, 12, 6)
# Of an element of queries and keys that are turned, beyond one kernel: times cosines, half of it
# negated, both halves together, times sines, and the sum; as much backward.
TURN_BYTES = 4 + 2 + 4 + 4 + 6 - 4
# Of an element of the gate, beyond one kernel: its function, and the product with the other half;
# backward two products and the function's.
GATE_FORWARD, GATE_BACKWARD = 4 + 6 - 6, 12 + 6 - 10
# Of a score that torch's ops scale and mask before the softmax: forward, and backward.
SCORE_BYTES = 4 + 5


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

    @property
    def is_flash(self) -> bool:
        """Whether attention is one kernel."""
        return self.attention.startswith("flash")

    def block_bytes(self, micro_batch: int, tp: int, *, sequence_parallel: bool) -> int:
        """What autograd keeps of a block beyond what a compiled step does."""
        tokens, kept = micro_batch * self.seq_len, 0
        if not self.norm_kernel:  # two norms: the input and the result, both in float32, less one
            width = self.hidden_size // (tp if sequence_parallel else 1)
            kept += 2 * tokens * width * (4 + 4 - 2)
        if not self.is_flash:
            scores = micro_batch * self.heads // tp * self.seq_len**2
            kept += scores * (2 if self.attention == "softmax kernel" else 4)
        return kept

    def block_work(self, work: Work, micro_batch: int, tp: int, *, sequence_parallel: bool) -> Work:
        """The kernels of a block, whose pointwise calls are one each in `work`: those of torch's
        ops too. FlashAttention 1 takes twice as long as its successor (Dao, arXiv 2307.08691,
        abstract).
        """
        ways = work.forward.copy(), work.backward.copy()
        elements = micro_batch * self.seq_len * self.hidden_size
        gated = micro_batch * self.seq_len * self.feed_forward // tp
        for way, size in zip(ways, (GATE_FORWARD, GATE_BACKWARD), strict=True):
            way[Kernel(KernelKind.TRAFFIC, 0, size * gated)] += 1
            way[Kernel(KernelKind.TRAFFIC, 0, TURN_BYTES * elements // tp)] += 2
        if not self.norm_kernel:
            held = elements // (tp if sequence_parallel else 1)
            for way, each in zip(ways, (NORM_FORWARD, NORM_BACKWARD), strict=True):
                way.update(Kernel(KernelKind.TRAFFIC, 0, size * held) for size in each * 2)
        scores = micro_batch * self.heads // tp * self.seq_len**2
        for way in ways:
            if self.attention == "ops":
                way[Kernel(KernelKind.TRAFFIC, 0, SCORE_BYTES * scores)] += 1
            if self.attention == "flash 1":
                way.update([k for k in way if k.kind is KernelKind.ATTENTION])
        return Work(*ways)

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
        self.heads, self.is_flash = shape.heads, shape.is_flash
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
        if self.is_flash:
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
    split = sequence_parallel
    more = shape.block_bytes(micro_batch, tp, sequence_parallel=split)
    first, middle, last = (
        replace(
            b, saved_bytes=b.saved_bytes + more,
            work=shape.block_work(b.work, micro_batch, tp, sequence_parallel=split),
        )
        for b in blocks
    )  # fmt: skip
    head_bytes = after.saved_bytes + shape.head_bytes(micro_batch, tp)
    after = replace(after, saved_bytes=head_bytes)
    return before, first, *[middle] * (shape.layers - 2), last, after
