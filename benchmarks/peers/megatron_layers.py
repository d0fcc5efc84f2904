"""Megatron-LM's parallel layers for a Llama, written anew from the papers with torch's own parts.

Column- and row-parallel products with the pair f and g, and a vocabulary-parallel embedding:
Shoeybi et al. 2019 (arXiv 1909.08053, section 3); the loss on parts of the vocabulary: ibid.;
recomputation of whole layers or of attention's core: Korthikanti et al. 2022 (arXiv 2205.05198,
section 5). All collectives block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """The ranks that share each layer, and which of them this is."""

    group: dist.ProcessGroup
    rank: int
    ranks: int

    def part(self, whole: Tensor, dim: int = 0) -> Tensor:
        """This rank's part of a weight."""
        return whole.detach().tensor_split(self.ranks, dim)[self.rank].clone()

    def whole(self, part: Tensor, dim: int = 0) -> Tensor:
        """A weight of which every rank has a part of the same size; collective."""
        parts = [torch.empty_like(part) for _ in range(self.ranks)]
        dist.all_gather(parts, part.detach().contiguous(), group=self.group)
        return torch.cat(parts, dim)

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in place."""
        if self.ranks > 1:
            dist.all_reduce(x, group=self.group)
        return x


class _Copy(torch.autograd.Function):
    """The papers' f: what all ranks read; its gradients are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.tp.sum(gradients[0].contiguous()), None


class _Reduce(torch.autograd.Function):
    """The papers' g: partial sums, added up; all ranks have the same gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.mark_dirty(x)
        return tp.sum(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _VocabularyLoss(torch.autograd.Function):
    """Each word's cross-entropy [n] of logits [n, part of the vocabulary] and labels [n]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, tp: TensorParallel) -> Tensor:
        peak = logits.max(-1).values
        if tp.ranks > 1:
            dist.all_reduce(peak, dist.ReduceOp.MAX, group=tp.group)
        shifted = logits - peak.unsqueeze(-1)
        own = labels - tp.rank * logits.shape[-1]
        there = (own >= 0) & (own < logits.shape[-1])
        own = own.where(there, 0)
        wanted = tp.sum(shifted.gather(-1, own.unsqueeze(-1)).squeeze(-1) * there)
        shares = shifted.exp_()
        total = tp.sum(shares.sum(-1))
        ctx.save_for_backward(shares.div_(total.unsqueeze(-1)), own, there)
        return total.log() - wanted

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        shares, own, there = ctx.saved_tensors
        rows = torch.arange(len(own))
        shares[rows, own] -= there.to(shares.dtype)
        return shares.mul_(gradients[0].unsqueeze(-1)), None, None


class Attention(nn.Module):
    """Query, key and value in one column-parallel product, and the row-parallel one behind."""

    def __init__(self, source: Any, tp: TensorParallel, recompute: str) -> None:
        super().__init__()
        self.width, self.tp, self.recompute = source.head_dim, tp, recompute
        packed = [tp.part(p.weight) for p in (source.q_proj, source.k_proj, source.v_proj)]
        self.qkv = nn.Parameter(torch.cat(packed))
        self.out = nn.Parameter(tp.part(source.o_proj.weight, 1))

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Of [batch, sequence, hidden]."""
        packed = F.linear(_Copy.apply(x, self.tp), self.qkv)
        q, k, v = packed.unflatten(-1, (3, -1, self.width)).transpose(1, 3).unbind(2)
        if self.recompute == "selective":
            mixed = checkpoint(self.core, q, k, v, rotary, use_reentrant=False)
        else:
            mixed = self.core(q, k, v, rotary)
        return _Reduce.apply(F.linear(mixed.transpose(1, 2).flatten(2), self.out), self.tp)

    def core(self, q: Tensor, k: Tensor, v: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Causal attention of [batch, heads, sequence, width] each."""
        q, k = apply_rotary_pos_emb(q, k, *rotary)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """The weights under the model's names; collective over tp."""
        for name, part in zip("qkv", self.qkv.chunk(3), strict=True):
            yield f"self_attn.{name}_proj.weight", self.tp.whole(part)
        yield "self_attn.o_proj.weight", self.tp.whole(self.out, 1)


class FeedForward(nn.Module):
    """Gate and up in one column-parallel product, and the row-parallel one behind."""

    def __init__(self, source: Any, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        packed = [tp.part(p.weight) for p in (source.gate_proj, source.up_proj)]
        self.gate_up = nn.Parameter(torch.cat(packed))
        self.down = nn.Parameter(tp.part(source.down_proj.weight, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Of [batch, sequence, hidden]."""
        gate, up = F.linear(_Copy.apply(x, self.tp), self.gate_up).chunk(2, -1)
        return _Reduce.apply(F.linear(F.silu(gate) * up, self.down), self.tp)

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """The weights under the model's names; collective over tp."""
        for name, part in zip(("gate", "up"), self.gate_up.chunk(2), strict=True):
            yield f"mlp.{name}_proj.weight", self.tp.whole(part)
        yield "mlp.down_proj.weight", self.tp.whole(self.down, 1)


class Layer(nn.Module):
    """A transformer layer; "full" recomputation keeps its input only."""

    def __init__(self, source: Any, tp: TensorParallel, recompute: str) -> None:
        super().__init__()
        self.recompute = recompute
        self.attention = Attention(source.self_attn, tp, recompute)
        self.feed_forward = FeedForward(source.mlp, tp)
        self.norm_1, self.norm_2 = source.input_layernorm, source.post_attention_layernorm

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Of [batch, sequence, hidden]."""
        if self.recompute == "full":
            return checkpoint(self.run, x, rotary, use_reentrant=False)
        return self.run(x, rotary)

    def run(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Both halves, each beside its residual."""
        x = x + self.attention(self.norm_1(x), rotary)
        return x + self.feed_forward(self.norm_2(x))

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """The weights under the model's names; collective over tp."""
        yield from self.attention.whole()
        yield from self.feed_forward.whole()
        yield "input_layernorm.weight", self.norm_1.weight
        yield "post_attention_layernorm.weight", self.norm_2.weight


class Part(nn.Module):
    """The layers of a pipeline rank, with the embedding on the first and the loss on the last."""

    def __init__(
        self,
        model: Any,
        which: range,
        tp: TensorParallel,
        recompute: str,
        *,
        first: bool,
        last: bool,
    ) -> None:
        super().__init__()
        self.tp, self.first, self.last, self.which = tp, first, last, which
        inner = model.model
        self.layers = nn.ModuleList(Layer(inner.layers[k], tp, recompute) for k in which)
        self.rotary = inner.rotary_emb
        if first:
            self.words = nn.Parameter(tp.part(inner.embed_tokens.weight))
        if last:
            self.norm, self.head = inner.norm, nn.Parameter(tp.part(model.lm_head.weight))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Words [batch, sequence], or what the rank before gives; gives the loss on the last."""
        if self.first:
            x = self.embed(x)
        rotary = self.rotary(x, torch.arange(x.shape[1]).unsqueeze(0))
        for layer in self.layers:
            x = layer(x, rotary)
        if not self.last:
            return x
        x = _Copy.apply(self.norm(x)[:, :-1].flatten(0, 1), self.tp)
        return _VocabularyLoss.apply(
            F.linear(x, self.head), labels[:, 1:].flatten(), self.tp
        ).mean()

    def embed(self, words: Tensor) -> Tensor:
        """This rank's words from the table, the others' from the other ranks."""
        own = words - self.tp.rank * len(self.words)
        there = (own >= 0) & (own < len(self.words))
        found = F.embedding(own.where(there, 0), self.words) * there.unsqueeze(-1)
        return _Reduce.apply(found, self.tp)

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """The weights under the model's names; collective over tp."""
        if self.first:
            yield "model.embed_tokens.weight", self.tp.whole(self.words)
        for k, layer in zip(self.which, self.layers, strict=True):
            for name, weight in layer.whole():
                yield f"model.layers.{k}.{name}", weight
        if self.last:
            yield "model.norm.weight", self.norm.weight
            yield "lm_head.weight", self.tp.whole(self.head)
