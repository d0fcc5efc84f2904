"""Ring attention: `merakc::ring_attention`, blocks of keys and values that pass by all ranks.

Each rank keeps its queries, and has one block of keys and values at a time: it attends to that one
while the next is under way, and joins the results by their logsumexp (Liu et al., arXiv 2310.01889;
Milakov and Gimelshein, arXiv 1805.02867). The backward passes the blocks around again, and behind
each the sum of its gradients, in the precision of the logsumexp, which ends where the block is at
home. So a rank holds two blocks, whatever the number of ranks.

All ranks take the same steps in the same order. A step is an all-to-all in which each rank sends to
one other: its place in the order of collectives is seen, watched and waited for like theirs, and
NCCL makes one send and one receive of it.

Legend of shapes as in `merakc.kernels.attention`; s rows of queries, and as many of keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from merakc.kernels.attention import (
    attention_backward_now,
    attention_now,
    fake,
    fake_backward,
)
from merakc.kernels.attention_formulas import lse_dtype, to_bsh, to_bshd
from merakc.kernels.attention_rows import sink_gradient, with_sink
from merakc.kernels.collectives import Pending
from merakc.kernels.exchange import start_all_to_all
from merakc.kernels.ring.pieces import Call, calls, count_of, pieces

RING = "merakc.ring_attention.default"
# Where the queries stand among the arguments of the two ops.
PLACES = {RING: 0, "merakc.ring_attention_backward.default": 1}


class Ring(NamedTuple):
    """Rank `rank` of an axis, of which rank k has `rows[k]` rows of a sequence, the later halves
    `swapped` or not. It attends to the blocks of the ranks so many `hops` before it, the first of
    which is its own.
    """

    axis: str
    rows: Sequence[int]
    hops: Sequence[int]
    swapped: bool
    rank: int

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.rows)

    def block(self, hop: int) -> int:
        """Whose block this rank has behind so many hops."""
        return (self.rank - hop) % self.size

    def count(self, owner: int) -> int:
        """The rows of a rank's block."""
        return count_of(pieces(self.rows, owner, swapped=self.swapped))

    def calls(self, owner: int, *, causal: bool) -> list[Call]:
        """The attentions of this rank's queries to the block of a rank."""
        own, its = (pieces(self.rows, k, swapped=self.swapped) for k in (self.rank, owner))
        return calls(own, its, causal=causal)

    def steps(self) -> list[tuple[int, int]]:
        """By how many ranks blocks move on behind each hop but the last, and to which hop."""
        return [(b - a, b) for a, b in zip(self.hops, self.hops[1:], strict=False)]

    def send(self, x: Tensor, shift: int, counts: int) -> Pending:
        """Starts to send x so many ranks on, and to get as many elements as `counts` says from as
        many ranks before.
        """
        received = x.new_empty(counts)
        there, here = (self.rank + shift) % self.size, (self.rank - shift) % self.size
        sizes = [counts if k == here else 0 for k in range(self.size)]
        away = [x.numel() if k == there else 0 for k in range(self.size)]
        return start_all_to_all(self.axis, received, x, sizes, away, lambda: received)


class _Blocks:
    """Keys and values of one block after the other, in one piece of memory each."""

    def __init__(self, ring: Ring, k: Tensor, v: Tensor) -> None:
        self.ring = ring
        self.heads = k.shape[0], k.shape[1]
        self.widths = k.shape[3], v.shape[3]
        self.k, self.v = k, v

    def __iter__(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """The hop, keys and values, while those of the next are under way."""
        ring, held = self.ring, torch.empty(0)
        k, v, steps = self.k, self.v, ring.steps()
        if steps:
            held = torch.cat([k.reshape(-1), v.reshape(-1)])
        for place, hop in enumerate(ring.hops):
            coming = None
            if place < len(steps):
                shift, following = steps[place]
                coming = ring.send(held, shift, self.numel(ring.block(following)))
            yield hop, k, v
            if coming is not None:
                held = coming.wait()
                k, v = self.parted(held, ring.block(following))

    def numel(self, owner: int) -> int:
        """The elements of a rank's keys and values."""
        b, g = self.heads
        return b * g * self.ring.count(owner) * sum(self.widths)

    def parted(self, flat: Tensor, owner: int) -> tuple[Tensor, Tensor]:
        """Keys and values [b, g, t, .] of what lies one behind the other."""
        (b, g), t = self.heads, self.ring.count(owner)
        d, e = self.widths
        k, v = flat.split_with_sizes([b * g * t * d, b * g * t * e])
        return k.view(b, g, t, d), v.view(b, g, t, e)


class _Seen(NamedTuple):
    """Queries, keys and the mask between them, of one call."""

    rows: tuple[slice, ...]
    keys: tuple[slice, ...]
    mask: Tensor | None
    causal: bool


def _seen(ring: Ring, owner: int, mask: Tensor | None, causal: bool) -> Iterator[_Seen]:
    """What of the block of a rank this rank's queries see. A mask is that of all columns."""
    every, block = slice(None), None
    if mask is not None:
        own = pieces(ring.rows, owner, swapped=ring.swapped)
        columns = [mask[..., p.start : p.start + p.rows] for p in own]
        block = mask if mask.shape[-1] == 1 else torch.cat(columns, -1)
    for call in ring.calls(owner, causal=causal):
        rows, keys = slice(*call.queries), slice(*call.keys)
        seen, diagonal = None, call.causal
        if block is not None:
            seen = block if block.shape[-2] == 1 else block[..., rows, :]
            seen = seen if seen.shape[-1] == 1 else seen[..., keys]
            if diagonal:
                count = rows.stop - rows.start
                below = seen.new_ones(count, count).tril_()
                seen, diagonal = seen & below, False
            if seen.is_cpu and not seen.any():  # looked at where that holds nothing up
                continue
        yield _Seen((every, every, rows), (every, every, keys), seen, diagonal)


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float,
    sink: Tensor | None, ring: Ring,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`merakc::attention` of a rank's queries to the keys and values of all ranks, with the
    logsumexp. A mask, of bools, has the rows that the rank has, and all columns.
    """
    _check(q, k, v, mask, ring)
    dtype = lse_dtype(q.dtype)
    out = q.new_zeros((*q.shape[:1], q.shape[2], q.shape[1], v.shape[3]), dtype=dtype)
    out = out.transpose(1, 2)
    logsumexp = out.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf).transpose(1, 2)
    for hop, keys, values in _Blocks(ring, k, v):
        for at, seen, own_mask, diagonal in _seen(ring, ring.block(hop), mask, causal):
            part, own = attention_now(
                q[at], keys[seen], values[seen], own_mask, diagonal, scale, 0, None
            )
            if own_mask is not None:  # kernels give rows without keys some number
                own = own.masked_fill(~own_mask.any(-1), -torch.inf)
            _join(out[at], logsumexp[at], part, own)
    if mask is not None:  # of rows without keys each probability, exp(x - inf), is 0
        logsumexp = logsumexp.masked_fill(logsumexp == -torch.inf, torch.inf)
    out, logsumexp = to_bshd(out, q.dtype), to_bsh(logsumexp)
    return (out, logsumexp) if sink is None else with_sink(out, logsumexp, sink)


def _join(out: Tensor, logsumexp: Tensor, part: Tensor, own: Tensor) -> None:
    """Adds what rows find in one block to what they have found."""
    together = torch.logaddexp(logsumexp, own)
    base = together.masked_fill(together == -torch.inf, 0.0)
    out.mul_((logsumexp - base).exp_().unsqueeze(-1))
    out.addcmul_(part.to(out.dtype), (own - base).exp_().unsqueeze(-1))
    logsumexp.copy_(together)


def ring_attention_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor,
    mask: Tensor | None, causal: bool, scale: float, ring: Ring,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of this rank's q, k and v, from what all ranks make of them."""
    dq = q.new_zeros((*q.shape[:1], q.shape[2], q.shape[1], q.shape[3]), dtype=logsumexp.dtype)
    dq, blocks = dq.transpose(1, 2), _Blocks(ring, k, v)
    shifts = [shift for shift, _ in ring.steps()] + [-ring.hops[-1] % ring.size]
    after = [ring.block(hop) for hop in ring.hops[1:]] + [ring.rank]
    coming: Pending | None = None
    flat = torch.empty(0)
    for place, (hop, keys, values) in enumerate(blocks):
        owner = ring.block(hop)
        flat = dq.new_zeros(blocks.numel(owner))
        dk, dv = blocks.parted(flat, owner)
        for at, seen, own_mask, diagonal in _seen(ring, owner, mask, causal):
            made = attention_backward_now(
                grad_out[at], q[at], keys[seen], values[seen], out[at], logsumexp[at],
                own_mask, diagonal, scale, 0,
            )  # fmt: skip
            for total, part in zip((dq[at], dk[seen], dv[seen]), made, strict=True):
                total.add_(part)
        if coming is not None:
            flat.add_(coming.wait())
        if shifts[place]:  # of a sum that has been everywhere, home
            coming = ring.send(flat, shifts[place], blocks.numel(after[place]))
    flat = flat if coming is None else coming.wait()
    dk, dv = blocks.parted(flat, ring.rank)
    return to_bshd(dq, q.dtype), to_bshd(dk, k.dtype), to_bshd(dv, v.dtype)


def working_bytes(
    shapes: Sequence[Sequence[int]], dtype: torch.dtype, hops: int, *, backward: bool
) -> int:
    """What an op takes for queries, keys and values of such `shapes`: two blocks of keys and
    values, the result as it grows and what is added to it; backward sums of gradients, coming,
    made and going on.
    """
    queries, *block = map(math.prod, shapes)
    own, wide = dtype.itemsize, lse_dtype(dtype).itemsize
    held = 2 * own if hops > 1 else 0
    return sum(block) * (held + backward * (2 * wide + own)) + queries * (wide + own)


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, ring: Ring) -> None:
    count = ring.count(ring.rank)
    assert q.shape[2] == k.shape[2] == v.shape[2] == count, (q.shape, k.shape, v.shape, ring)
    assert ring.hops[0] == 0, ring
    assert mask is None or mask.dtype == torch.bool, mask


# Registration

_RING = "str axis, int[] rows, int[] hops, bool swapped, int rank"


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float,
    sink: Tensor | None, *ring: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return ring_attention(q, k, v, mask, causal, scale, sink, Ring(*ring))


def _backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor,
    mask: Tensor | None, causal: bool, scale: float, *ring: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return ring_attention_backward(
        grad_out, q, k, v, out, logsumexp, mask, causal, scale, Ring(*ring)
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, ctx.causal, ctx.scale, sink, *ctx.ring = inputs
    ctx.save_for_backward(q, k, v, mask, *output, sink)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, mask, out, logsumexp, sink = ctx.saved_tensors
    grads = torch.ops.merakc.ring_attention_backward(
        grad_out, q, k, v, out, logsumexp, mask, ctx.causal, ctx.scale, *ctx.ring
    )
    own = None if sink is None else sink_gradient(grad_out, out, logsumexp, sink)
    return *grads, None, None, None, own, *([None] * len(ctx.ring))


torch.library.define(
    "merakc::ring_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float scale, Tensor? sink,"
    f" {_RING}) -> (Tensor out, Tensor logsumexp)",
)
torch.library.define(
    "merakc::ring_attention_backward",
    "(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, Tensor? mask,"
    f" bool causal, float scale, {_RING}) -> (Tensor dq, Tensor dk, Tensor dv)",
)
torch.library.impl("merakc::ring_attention", "default", _forward)
torch.library.impl("merakc::ring_attention_backward", "default", _backward)
torch.library.register_fake("merakc::ring_attention", fake)
torch.library.register_fake("merakc::ring_attention_backward", fake_backward)
torch.library.register_autograd("merakc::ring_attention", _differentiate, setup_context=_save)
