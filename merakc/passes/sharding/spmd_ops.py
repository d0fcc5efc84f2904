"""The ops that a tp rank calls in another form: with local shapes, or as a kernel of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch

from merakc.errors import ShardError
from merakc.ir.graph import Node, Ref, TensorSpec, map_refs
from merakc.kernels.draws import KEY_POSITION
from merakc.passes.sharding.dims import argument, broadcast_shape, given, named_dims, signature
from merakc.passes.sharding.draw_blocks import draw_blocks
from merakc.passes.sharding.layouts import Sharding
from merakc.passes.sharding.rows import Along, Loss, Shape
from merakc.passes.sharding.rules import ROWS

ATTENTION = "merakc.attention.default"
START = 6  # of its arguments
MEAN = 1  # at::Reduction


class Writer(Protocol):
    """What writes one rank's graph (`merakc.passes.sharding.spmd.SpmdPartitioner`), as the ops see
    it.
    """

    sharding: Sharding
    axis: str
    rank: int
    nodes: list[Node]
    now: dict[Ref, Ref]
    made: set[str]

    def is_split(self, ref: Ref) -> bool:
        """Whether a value is split, as the node being written sees it."""

    def local_spec(self, ref: Ref) -> TensorSpec:
        """Shape and dtype of this rank's part of a value."""

    def local_shape(self, node: Node, index: int = 0) -> tuple[int, ...]:
        """The local shape of one of the node's outputs."""

    def read(self, ref: Ref) -> Ref:
        """A value as an op that is the same on every rank reads it."""

    def enter(self, ref: Ref) -> Ref:
        """A value as an op on split dims reads it."""

    def add(self, node: Node, args: Any, op: str | None = None) -> None:
        """Adds a node under its own name with local outputs."""

    def add_sum(self, node: Node, op: str, args: Any) -> Ref:
        """Adds a node that leaves partial sums, and their all-reduce."""

    def add_bias(self, node: Node, total: Ref, bias: Ref | None, view: tuple[int, ...]) -> None:
        """Adds the bias of a product after its sum, once."""

    def constant(self, name: str, value: torch.Tensor) -> Ref:
        """A new constant input."""

    def named(self, ref: Ref, what: str) -> str:
        """The name of a node that makes something of a value: no other of the graph has it."""


def _linear(out: Writer, node: Node) -> None:
    bias = argument(node, 2, "bias")
    if node.name not in out.sharding.partial:
        out.add(node, map_refs(node.args, out.enter))
        return
    product = replace(node, kwargs=())
    total = out.add_sum(product, node.op, map_refs(node.args[:2], out.enter))
    out.add_bias(node, total, bias, (0,))


def _addmm(out: Writer, node: Node) -> None:
    if node.name not in out.sharding.partial:
        out.add(node, map_refs(node.args, out.enter))
        return
    assert not node.kwargs, "addmm with alpha or beta"
    total = out.add_sum(node, "aten.mm.default", map_refs(node.args[1:3], out.enter))
    out.add_bias(node, total, node.args[0], (0,))


def _scaled_linear(out: Writer, node: Node) -> None:
    """Rows are scaled by largest magnitudes over the ranks that share them."""
    args, axes = map_refs(node.args[:2], out.enter), ["", ""]
    if out.is_split(node.args[1]):
        outer, inner = out.sharding.layouts[node.args[1]].dims
        axes = [out.axis if any(f.split for f in dim) else "" for dim in (inner, outer)]
    before = [argument(node, 2, "inner", ""), argument(node, 3, "outer", "")]
    if any(own and other for own, other in zip(axes, before, strict=True)):
        raise ShardError(
            f"{node.source}: cp and tp both split what a product of float8 sums over: choose "
            'cp=1 or tp=1, or precision="bf16-mixed"'
        )
    args = (*args, *(own or other for own, other in zip(axes, before, strict=True)))
    if node.name in out.sharding.partial:
        out.add_sum(node, node.op, args)
    else:
        out.add(node, args)


def _convolution(out: Writer, node: Node) -> None:
    """A rank's groups are its part of the groups of channels."""
    groups = _outer(out, node.args[0], 1, node.args[8])
    args = (*map_refs(node.args[:8], out.enter), groups)
    if node.name not in out.sharding.partial:
        out.add(node, args)
        return
    total = out.add_sum(node, node.op, (*args[:2], None, *args[3:]))
    spatial = len(node.spec.shape) - 2
    out.add_bias(node, total, node.args[2], (node.spec.shape[1], *(1,) * spatial))


def _group_norm(out: Writer, node: Node) -> None:
    groups = _outer(out, node.args[0], 1, node.args[1])
    first, *rest = map_refs((node.args[0], *node.args[2:]), out.enter)
    out.add(node, (first, groups, *rest))


def _outer(out: Writer, ref: Ref, dim: int, parts: int) -> int:
    """How many of the `parts` equal parts of a dim the rank has."""
    found = 1
    for factor in out.sharding.layouts[ref].dims[dim]:
        if parts == 1:
            break
        if parts % factor.size:
            break  # a factor that is not split, of which the parts are the outer half
        found *= factor.local_size(out.sharding.tp, out.rank)
        parts //= factor.size
    return found * parts


def _repeat(out: Writer, node: Node) -> None:
    """The copies of a dim are its outer factor: the rank makes its part of them."""
    copies = tuple(_outer(out, Ref(node.name), k, c) for k, c in enumerate(node.args[1]))
    out.add(node, (*map_refs(node.args[:1], out.enter), copies))


def _averaged(out: Writer, node: Node) -> None:
    """A mean whose parts are weighted by the rank's share of the elements."""
    args = map_refs(node.args, out.enter)
    if node.name not in out.sharding.partial:
        out.add(node, args)
    elif "reduction" in signature(node.op) and given(node, "reduction") != MEAN:
        out.add_sum(node, node.op, args)
    else:
        part = out.named(Ref(node.name), "part")
        spec = TensorSpec(out.local_shape(node), node.spec.dtype)
        kwargs = map_refs(node.kwargs, out.enter)
        out.nodes.append(replace(node, name=part, args=args, kwargs=kwargs, outputs=(spec,)))
        out.add_sum(replace(node, kwargs=()), "aten.mul.Tensor", (Ref(part), _share(out, node)))


def _share(out: Writer, node: Node) -> float:
    """The rank's part of the elements that make one element of a mean."""
    lays = [out.sharding.layouts[ref] for ref in node.refs]
    full = torch.Size(broadcast_shape([lay.shape for lay in lays])).numel()
    local = [lay.local_shape(out.sharding.tp, out.rank) for lay in lays]
    own = torch.Size(broadcast_shape(local)).numel()
    results = torch.Size(out.local_shape(node)).numel()
    return own * node.spec.numel / (full * results)


def _shaped(out: Writer, node: Node) -> None:
    """Reshape and expand: the shape that they are given is the local one."""
    args = (*map_refs(node.args[:1], out.enter), out.local_shape(node), *node.args[2:])
    out.add(node, args)


def _squeeze(out: Writer, node: Node) -> None:
    """A reshape: a split dim of which the rank has one is not to be squeezed."""
    args = (*map_refs(node.args[:1], out.enter), out.local_shape(node))
    out.add(replace(node, kwargs=()), args, "aten.reshape.default")


def _slice(out: Writer, node: Node) -> None:
    """The rank's part of a segment, or of several: what it has before them is skipped."""
    lay = out.sharding.layouts[node.args[0]]
    dim = argument(node, 1, "dim", 0) % len(lay.dims)
    first = map_refs(node.args[:1], out.enter)
    if not any(f.split for f in lay.dims[dim]):
        out.add(node, (*first, *node.args[1:]))
        return
    full, length = lay.shape[dim], node.spec.shape[dim]
    start = argument(node, 2, "start") or 0
    start = max(start + full, 0) if start < 0 else start
    index = lay.index(dim, out.sharding.tp, out.rank)
    before, inside = ((index < end).sum().item() for end in (start, start + length))
    out.add(replace(node, kwargs=()), (*first, dim, before, inside))


def _split(out: Writer, node: Node) -> None:
    dim = argument(node, 2, "dim", 0)
    sizes = tuple(out.local_shape(node, k)[dim] for k in range(len(node.outputs)))
    first = map_refs(node.args[:1], out.enter)
    op = "aten.split_with_sizes.default"
    out.add(replace(node, kwargs=()), (*first, sizes, dim), op)


def _fresh(out: Writer, node: Node) -> None:
    """A tensor made from nothing: made whole, then the rank's part is taken."""
    lay = out.sharding.layouts[Ref(node.name)]
    if not lay.is_split:
        out.nodes.append(node)
        return
    whole = replace(node, name=out.named(Ref(node.name), "whole"))
    out.nodes.append(whole)
    _take_part(out, node, Ref(whole.name))


def _take_part(out: Writer, node: Node, ref: Ref) -> None:
    """The rank's part of the node's result, of which `ref` is the whole."""
    lay = out.sharding.layouts[Ref(node.name)]
    shape = list(node.spec.shape)
    split = [k for k, dim in enumerate(lay.dims) if any(f.split for f in dim)]
    for dim in split:
        index = lay.index(dim, out.sharding.tp, out.rank)
        shape[dim] = len(index)
        constant = out.constant(out.named(Ref(node.name), f"index{dim}"), index)
        name = node.name if dim == split[-1] else out.named(Ref(node.name), f"part{dim}")
        spec = TensorSpec(tuple(shape), node.spec.dtype)
        op = "aten.index_select.default"
        out.nodes.append(replace(node, name=name, op=op, args=(ref, dim, constant), kwargs=(),
                                 outputs=(spec,)))  # fmt: skip
        ref = Ref(name)


def _cut(out: Writer, node: Node) -> None:
    """An op that needs a dim whole, and of whose result a rank takes its part of that dim."""
    lay = out.sharding.layouts[Ref(node.name)]
    chosen = named_dims(node, "dim", len(lay.dims))
    if not any(f.split for k in chosen for f in lay.dims[k]):
        out.add(node, map_refs(node.args, out.enter))
        return
    kwargs = map_refs(node.kwargs, out.read)
    args = map_refs(node.args, out.read)
    whole = replace(node, name=out.named(Ref(node.name), "whole"), args=args, kwargs=kwargs)
    out.nodes.append(whole)
    entered = replace(
        node, name=out.named(Ref(node.name), "copy_to"), op="merakc.copy_to.default",
        args=(Ref(whole.name), out.axis), kwargs=(),
    )  # fmt: skip
    out.nodes.append(entered)
    _take_part(out, node, Ref(entered.name))


def _rows(out: Writer, table: Ref, dim: int) -> tuple[int, int]:
    """First row of this rank, and the number of all rows, of a table split by rows."""
    lay = out.sharding.layouts[table]
    (factor,) = lay.dims[dim]
    return factor.bounds(out.sharding.tp, out.rank)[0], factor.size


def _embedding(out: Writer, node: Node) -> None:
    if node.name not in out.sharding.partial:
        out.add(node, map_refs(node.args, out.enter))
        return
    table, ids = node.args[:2]
    start, _ = _rows(out, table, 0)
    padding = argument(node, 2, "padding_idx", -1)
    args = (out.enter(table), out.now.get(ids, ids), start, padding)
    out.add(replace(node, kwargs=()), args, "composite.vocab_parallel_embedding")


def _cross_entropy(out: Writer, node: Node) -> None:
    logits, target = node.args[:2]
    if node.name not in out.sharding.partial:
        out.add(node, map_refs(node.args, out.enter))
        return
    classes = (out.sharding.layouts[logits].dims[:2] or ((),))[-1]
    if not any(f.split for f in classes):  # samples are
        out.add_sum(node, node.op, map_refs(node.args, out.enter))
        return
    start, vocabulary = _rows(out, logits, 1)
    rest = (
        argument(node, 3, "reduction", 1),
        argument(node, 4, "ignore_index", -100),
        argument(node, 5, "label_smoothing", 0.0),
    )
    args = (out.enter(logits), out.now.get(target, target), start, vocabulary, *rest)
    out.add(replace(node, kwargs=()), args, "composite.vocab_parallel_cross_entropy")


def _attention(out: Writer, node: Node) -> None:
    """A rank's queries may be rows from any one on, which a causal mask goes by."""
    args = map_refs(node.args, out.enter)
    rows = out.sharding.layouts[Ref(node.name)].index(2, out.sharding.tp, out.rank)
    if not node.args[4] or len(rows) == node.spec.shape[2] or not len(rows):
        out.add(node, args)
        return
    start = int(rows[0])
    assert torch.equal(rows, torch.arange(start, start + len(rows))), "rows beside each other"
    out.add(node, (*args[:START], start, *args[START + 1 :]))


def _draw(out: Writer, node: Node) -> None:
    """Makes a shard's random numbers that part of the whole tensor's."""
    at = KEY_POSITION[node.op]
    own = out.sharding.layouts[Ref(node.name)]
    sample, blocks = draw_blocks(node, own, out.sharding.tp, out.rank)
    args = (
        *map_refs(node.args[:at], out.enter),
        node.args[at],
        sample,
        tuple(size for size, _, _ in blocks),
        tuple(start for _, start, _ in blocks),
        tuple(end - start for _, start, end in blocks),
    )
    if len(node.args) > at + 5:
        args = (*args, out.local_shape(node), *node.args[at + 6 :])
    out.add(node, args)


SPECIAL: dict[str, Callable[[Writer, Node], None]] = {
    "aten.linear.default": _linear,
    "aten.addmm.default": _addmm,
    "merakc.scaled_linear.default": _scaled_linear,
    "aten.convolution.default": _convolution,
    "aten.group_norm.default": _group_norm,
    "aten.repeat.default": _repeat,
    "aten.mean.default": _averaged,
    "aten.mean.dim": _averaged,
    "aten.reshape.default": _shaped,
    "aten.expand.default": _shaped,
    "aten.squeeze.default": _squeeze,
    "aten.squeeze.dim": _squeeze,
    "aten.squeeze.dims": _squeeze,
    "aten.slice.Tensor": _slice,
    "aten.split.Tensor": _split,
    "aten.split_with_sizes.default": _split,
    "aten.unsafe_split.Tensor": _split,
    "aten.unsafe_split_with_sizes.default": _split,
    "aten.embedding.default": _embedding,
    "aten.cross_entropy_loss.default": _cross_entropy,
    ATTENTION: _attention,
    **{op: _fresh for op, row in ROWS.items() if row == Shape("fresh")},
    **{op: _cut for op, row in ROWS.items() if isinstance(row, Along) and row.cut},
    **{op: _averaged for op, row in ROWS.items() if row == Loss()},
    **dict.fromkeys(KEY_POSITION, _draw),
}
