"""Floating point operations and memory traffic of one node."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from merakc.analysis.aliases import FREE
from merakc.ir.graph import Graph, Node, Ref, TensorSpec, map_refs
from merakc.kernels.attention_formulas import lse_dtype
from merakc.kernels.gemm import TORCHS
from merakc.kernels.opaque import OPAQUE, OPAQUE_BACKWARD, find
from merakc.kernels.ring.attention import PLACES as RINGS
from merakc.kernels.ring.swap import SWAP
from merakc.kernels.scores import PLACES as SCORES

# Every rank sends a part of its tensor to every other.
ALL_TO_ALL = ("merakc.dispatch.default", "merakc.combine.default", "merakc.exchange.default")
COLLECTIVES = ("merakc.all_reduce.default", "merakc.all_gather.default",
               "merakc.gather_to.default", "merakc.reduce_scatter.default",
               *ALL_TO_ALL, SWAP)  # fmt: skip
# Products and a collective in one node (`merakc.kernels.products`), by what the collective is.
PRODUCTS = {
    "merakc.gather_matmul.default": "merakc.gather_to.default",
    "merakc.matmul_scatter.default": "merakc.reduce_scatter.default",
}
# Products with the transpose of a weight; those of float8, whatever the dtype of their results.
LINEAR = ("aten.linear.default", "merakc.scaled_linear.default")
OWN_SCALED = "merakc.scaled_mm.default"
SCALED = ("aten._scaled_mm.default", OWN_SCALED)
PIPELINED = {**PRODUCTS, **dict.fromkeys(RINGS, "merakc.exchange.default")}


def node_flops(node: Node, specs: Mapping[Ref, TensorSpec]) -> int:
    """Multiplications and additions of a product, convolution or attention; 0 for other ops.

    torch's `FlopCounterMode` formulas, and our own for the composite ops that it never sees:
    linear and matmul, also beside collectives (2 m n k), and attention (4 b h s t d forward, 10
    backward with the scores made again, as in FlashAttention, arXiv 2205.14135).
    """
    op = TORCHS.get(node.op, node.op)
    if op in (*LINEAR, "aten.matmul.default", OWN_SCALED) or "grouped_mm." in op:
        return 2 * node.spec.numel * specs[node.args[0]].shape[-1]
    if op == "merakc.gather_matmul.default":
        made = sum(o.numel for o in node.outputs[1:] if o is not None)
        return 2 * made * specs[node.args[0]].shape[-1]
    if op == "merakc.matmul_scatter.default":
        return 2 * specs[node.args[0]].numel * node.spec.shape[-1]
    if op == "merakc.grouped_mm_weights.default":
        return 2 * specs[node.args[0]].numel * specs[node.args[1]].shape[-1]
    if op in SCORES:
        at = SCORES[op]
        return 2 * specs[node.args[at]].numel * specs[node.args[at + 1]].shape[0] * products(node)
    if op == "merakc.attention.default":
        return 4 * _pairs(*(specs[ref] for ref in node.args[:2]), causal=_causal(node, 4))
    if op == "merakc.attention_backward.default":
        return 10 * _pairs(*(specs[ref] for ref in node.args[1:3]), causal=_causal(node, 7))
    if op in RINGS:
        return (10 if RINGS[op] else 4) * _ring_pairs(node, specs)
    if op == OPAQUE:
        return find(node.args[-1]).flops
    if op == OPAQUE_BACKWARD:  # its forward again, and twice as much
        return 3 * find(node.args[-2]).flops
    if not op.startswith("aten."):
        return 0
    formula = flop_registry.get(getattr(torch.ops.aten, op.split(".")[1]))
    if formula is None:
        return 0

    def shape(ref: Ref) -> tuple[int, ...]:
        return specs[ref].shape

    outs = tuple([o.shape if o is not None else None for o in node.outputs])
    return _by_formula(formula, map_refs(node.args, shape), map_refs(node.kwargs, shape), outs)


def _causal(node: Node, place: int) -> bool:
    return len(node.args) > place and bool(node.args[place])


def _pairs(query: TensorSpec, key: TensorSpec, *, causal: bool) -> int:
    """The pairs of queries and keys, times the head dim, as if there were no mask; of causal rows
    that are a part of a sequence, as many more as the last of them attend to than rows do in the
    mean: the ranks of the others wait for theirs.
    """
    rows, keys = query.shape[-2], key.shape[-2]
    whole = query.numel * keys
    return whole * (2 * keys - rows) // keys if causal and 0 < rows < keys else whole


def _ring_pairs(node: Node, specs: Mapping[Ref, TensorSpec]) -> int:
    """The same, of an attention to which keys and values are passed around."""
    *_, rows, hops, swapped, _ = node.args
    at = RINGS[node.op]
    mask, causal = node.args[at + 3 : at + 5] if not at else node.args[6:8]
    blocks = ring_blocks(
        len(rows), len(hops), masked=mask is not None, causal=causal, swapped=swapped
    )
    return int(specs[node.args[at]].numel * sum(rows) * blocks / len(rows))


def ring_blocks(ranks: int, hops: int, *, masked: bool, causal: bool, swapped: bool) -> float:
    """How many blocks of keys the slowest of the ranks attends to, counted as above: causal rows
    as if there were no mask, where they are not a part of a sequence.
    """
    if masked or not causal:
        return (ranks + 1) / 2 if swapped else hops
    return ranks if swapped else 2 * ranks - 1


def ring_sent(node: Node, specs: Mapping[Ref, TensorSpec]) -> int:
    """The bytes that a rank sends: of blocks of keys and values, and, backward, of the sums of
    their gradients, which go home at last.
    """
    at, hops = RINGS[node.op], len(node.args[-3])
    key, value = (specs[ref] for ref in node.args[at + 1 : at + 3])
    sent = (hops - 1) * (key.size_bytes + value.size_bytes)
    if at:
        wide = lse_dtype(key.dtype).itemsize
        sent += (hops if node.args[-3][-1] else 0) * (key.numel + value.numel) * wide
    return sent


@lru_cache(maxsize=4096)
def _by_formula(
    formula: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: tuple[tuple[str, Any], ...],
    outs: tuple[tuple[int, ...] | None, ...],
) -> int:
    """Of a call of these shapes: layers have them all alike."""
    return int(formula(*args, **dict(kwargs), out_val=outs[0] if len(outs) == 1 else outs))


def products(node: Node) -> int:
    """How often a node of `SCORES` computes a product of their size: its backward, again."""
    return 1 + sum(node.args[-3:-1]) if SCORES[node.op] else 1


def product_shape(node: Node, specs: Mapping[Ref, TensorSpec]) -> tuple[int, int, int, int]:
    """Batch, m, n, k of a product."""
    op = TORCHS.get(node.op, node.op)
    if op in RINGS:
        b, h, m, d = specs[node.args[RINGS[op]]].shape
        return b * h, m, d, sum(node.args[-4])
    if op in ("merakc.attention.default", "merakc.attention_backward.default"):
        first, second = node.args[:2] if op == "merakc.attention.default" else node.args[1:3]
        b, h, m, d = specs[first].shape
        return b * h, m, d, specs[second].shape[-2]
    if op == "aten.addmm.default":
        first, second = node.args[1:3]
    elif op in LINEAR or op == OWN_SCALED:
        first = node.args[0]
        n, k = specs[node.args[2 if op == OWN_SCALED else 1]].shape
        return 1, specs[first].numel // k, n, k
    elif op in ("aten.matmul.default", "aten.mm.default", "aten.bmm.default", *SCALED):
        first, second = node.args[:2]
    else:
        return 0, 0, 0, 0
    left, right = specs[first].shape, specs[second].shape
    k, n = left[-1], right[-1] if len(right) > 1 else 1
    if len(right) <= 2:
        return 1, math.prod(left[:-1]), n, k
    m = left[-2] if len(left) > 1 else 1
    return node.spec.numel // (m * n), m, n, k


def node_bytes(node: Node, specs: Mapping[Ref, TensorSpec]) -> int:
    """Bytes read and written; 0 for views. Of products and a collective, those of the products."""
    if node.op in FREE:
        return 0
    read = sum(specs[r].size_bytes for r in dict.fromkeys(node.refs))
    written = sum(o.size_bytes for o in node.outputs if o is not None)
    if node.op == "merakc.gather_matmul.default":  # they read the first result, not what it is of
        return read - specs[node.args[0]].size_bytes + written
    if node.op == "merakc.matmul_scatter.default":
        return read + wire_bytes(node, specs)
    return read + written


def wire_bytes(node: Node, specs: Mapping[Ref, TensorSpec]) -> int:
    """The bytes of a collective's tensor, whole."""
    if node.op == "merakc.gather_matmul.default":
        return node.spec.size_bytes
    if node.op == "merakc.matmul_scatter.default":
        rows, dim = specs[node.args[0]], int(node.args[4])
        others = node.spec.numel // max(node.spec.shape[dim], 1)
        return others * rows.shape[dim] * node.spec.dtype.itemsize
    if node.op in RINGS:  # as of a gather, of which a rank sends all but its own part
        ranks = len(node.args[-4])
        return ring_sent(node, specs) * ranks // max(ranks - 1, 1)
    if node.op == SWAP:
        return specs[node.args[0]].size_bytes // 2
    sizes = [specs[r].size_bytes for r in node.refs]
    return max([*sizes, *(o.size_bytes for o in node.outputs if o is not None)])


def graph_flops(graph: Graph) -> int:
    """FLOPs of all nodes."""
    specs = graph.specs()
    return sum(node_flops(n, specs) for n in graph.nodes)
