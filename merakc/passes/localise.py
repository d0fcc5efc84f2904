"""The graph of one tp rank, with its collectives as nodes.

Where a split factor is summed, the partial sums are all-reduced; where a value that is not split
enters an op that is, its gradient is. These are Megatron's conjugate pair f and g (arXiv
1909.08053, section 3): `merakc.copy_to` (identity, all-reduce backward) and `merakc.all_reduce`
(identity backward), so that differentiating the rewritten graph gives the backward with its
collectives.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from merakc.ir.graph import (
    Graph,
    Input,
    InputKind,
    Node,
    Output,
    OutputKind,
    Ref,
    TensorSpec,
    map_refs,
)
from merakc.ir.layout import Layout
from merakc.passes.dims import argument
from merakc.passes.shard import Sharding

AXIS = "tp"


def localise(graph: Graph, sharding: Sharding, rank: int) -> Graph:
    """The graph of tp rank `rank`: local shapes, local constants, collectives."""
    if not any(lay.is_split for lay in sharding.layouts.values()):
        return graph
    return Localiser(graph, sharding, rank).run()


class Localiser:
    """Writes one rank's graph."""

    def __init__(self, graph: Graph, sharding: Sharding, rank: int) -> None:
        self.graph, self.sharding, self.rank = graph, sharding, rank
        self.specs = graph.specs()
        self.grads = graph.grad_values()
        self.nodes: list[Node] = []
        self.constants: dict[str, torch.Tensor] = {}
        self.inputs: list[Input] = []
        self.entered: dict[Ref, Ref] = {}  # values behind their copy_to
        self.now: dict[Ref, Ref] = {}  # values replaced by another

    def run(self) -> Graph:
        """The local graph."""
        for item in self.graph.inputs:
            own = self.sharding.layouts[Ref(item.name)]
            self.inputs.append(replace(item, spec=self.local_spec(Ref(item.name))))
            if item.name in self.graph.constants:
                full = self.graph.constants[item.name]
                self.constants[item.name] = own.take(full, self.sharding.tp, self.rank)
        for node in self.graph.nodes:
            self.write(node)
        outputs = tuple(self.output(o) for o in self.graph.outputs)
        inputs, constants = tuple(self.inputs), self.constants
        local = Graph(inputs, tuple(self.nodes), outputs, constants, self.graph.functions)
        local.verify()
        return local

    def is_split(self, ref: Ref) -> bool:
        """Whether a value is split."""
        return self.sharding.layouts[ref].is_split

    def local_spec(self, ref: Ref) -> TensorSpec:
        """Shape and dtype of this rank's part of a value."""
        return self.sharding.local_spec(ref, self.specs[ref], self.rank)

    def local_shape(self, node: Node, index: int = 0) -> tuple[int, ...]:
        """The local shape of one of the node's outputs."""
        return self.local_spec(Ref(node.name, index)).shape

    def enter(self, ref: Ref) -> Ref:
        """A value as an op on split dims reads it: its gradient there is a partial sum."""
        ref_now = self.now.get(ref, ref)
        if self.is_split(ref) or ref not in self.grads:
            return ref_now
        if ref not in self.entered:
            name = f"{ref.node}.{ref.index}.copy_to" if ref.index else f"{ref.node}.copy_to"
            spec = self.specs[ref]
            self.nodes.append(Node(name, "merakc.copy_to.default", (ref_now, AXIS), (), (spec,)))
            self.entered[ref] = Ref(name)
        return self.entered[ref]

    def write(self, node: Node) -> None:
        """Adds the local form of a node."""
        outs = [Ref(node.name, k) for k, o in enumerate(node.outputs) if o is not None]
        if not any(self.is_split(r) for r in (*node.refs, *outs)):
            self.add(node, map_refs(node.args, lambda r: self.now.get(r, r)))
            return
        special = SPECIAL.get(node.op)
        if special is not None:
            special(self, node)
        else:
            args = map_refs(node.args, self.enter)
            if node.name in self.sharding.partial:
                self.add_sum(node, node.op, args)
            else:
                self.add(node, args)

    def add(self, node: Node, args: Any, op: str | None = None) -> None:
        """Adds a node under its own name with local outputs."""
        kwargs = tuple((k, map_refs(v, self.enter)) for k, v in node.kwargs)
        outputs = tuple(
            None if o is None else self.local_spec(Ref(node.name, k))
            for k, o in enumerate(node.outputs)
        )
        self.nodes.append(
            replace(node, op=op or node.op, args=args, kwargs=kwargs, outputs=outputs)
        )

    def add_sum(self, node: Node, op: str, args: Any) -> Ref:
        """Adds a node that leaves partial sums, and their all-reduce."""
        self.add(node, args, op)
        name = f"{node.name}.all_reduce"
        reduced = replace(
            node,
            name=name,
            op="merakc.all_reduce.default",
            args=(Ref(node.name), AXIS, "sum"),
            kwargs=(),
            outputs=(self.nodes[-1].spec,),
        )
        self.nodes.append(reduced)
        self.now[Ref(node.name)] = Ref(name)
        return Ref(name)

    def add_bias(self, node: Node, total: Ref, bias: Ref | None, view: tuple[int, ...]) -> None:
        """Adds the bias of a product after its sum, once."""
        if bias is None:
            return
        bias = self.now.get(bias, bias)
        if len(view) > 1:
            shape = TensorSpec(view, node.spec.dtype)
            name = f"{node.name}.bias_view"
            self.nodes.append(
                replace(node, name=name, op="aten.reshape.default", args=(bias, view), kwargs=(),
                        outputs=(shape,))
            )  # fmt: skip
            bias = Ref(name)
        name = f"{node.name}.bias"
        self.nodes.append(
            replace(node, name=name, op="aten.add.Tensor", args=(total, bias), kwargs=())
        )
        self.now[Ref(node.name)] = Ref(name)

    def output(self, out: Output) -> Output:
        """An output; what the user reads is gathered whole."""
        if out.kind is not OutputKind.RESULT or not self.is_split(out.ref):
            return out.at(self.now.get(out.ref, out.ref))
        ref = self.now.get(out.ref, out.ref)
        lay = self.sharding.layouts[out.ref]
        for dim, factors in enumerate(lay.dims):
            if any(f.split for f in factors):
                ref = self.gather(out, ref, lay, dim)
        return out.at(ref)

    def gather(self, out: Output, ref: Ref, lay: Layout, dim: int) -> Ref:
        """All ranks' parts of one dim, in the full tensor's order."""
        tp = self.sharding.tp
        index = [lay.index(dim, tp, r) for r in range(tp)]
        sizes = tuple(len(i) for i in index)
        shape = list(self.local_spec(out.ref).shape)
        shape[dim] = sum(sizes)
        spec = TensorSpec(tuple(shape), self.specs[out.ref].dtype)
        name = f"{ref.node}.all_gather{dim}"
        args = (ref, AXIS, dim, sizes, self.rank)
        self.nodes.append(Node(name, "merakc.all_gather.default", args, (), (spec,)))
        order = torch.cat(index).argsort()
        if torch.equal(order, torch.arange(len(order))):
            return Ref(name)
        constant = self.constant(f"{name}.order", order)
        ordered = Node(
            f"{name}.ordered", "aten.index_select.default", (Ref(name), dim, constant), (), (spec,)
        )
        self.nodes.append(ordered)
        return Ref(ordered.name)

    def constant(self, name: str, value: torch.Tensor) -> Ref:
        """A new constant input."""
        spec = TensorSpec(tuple(value.shape), value.dtype)
        self.inputs.append(Input(name, InputKind.CONSTANT, spec))
        self.constants[name] = value
        return Ref(name)


# ---------------------------------------------------------------- ops with a local form


def _linear(out: Localiser, node: Node) -> None:
    bias = argument(node, 2, "bias")
    if node.name not in out.sharding.partial:
        out.add(node, map_refs(node.args, out.enter))
        return
    product = replace(node, kwargs=())
    total = out.add_sum(product, node.op, map_refs(node.args[:2], out.enter))
    out.add_bias(node, total, bias, (0,))


def _addmm(out: Localiser, node: Node) -> None:
    if node.name not in out.sharding.partial:
        out.add(node, map_refs(node.args, out.enter))
        return
    assert not node.kwargs, "addmm with alpha or beta"
    total = out.add_sum(node, "aten.mm.default", map_refs(node.args[1:3], out.enter))
    out.add_bias(node, total, node.args[0], (0,))


def _convolution(out: Localiser, node: Node) -> None:
    args = map_refs(node.args, out.enter)
    if node.name not in out.sharding.partial:
        out.add(node, args)
        return
    total = out.add_sum(node, node.op, (*args[:2], None, *args[3:]))
    spatial = len(node.spec.shape) - 2
    out.add_bias(node, total, node.args[2], (node.spec.shape[1], *(1,) * spatial))


def _shaped(out: Localiser, node: Node) -> None:
    """Reshape and expand: the shape that they are given is the local one."""
    args = (*map_refs(node.args[:1], out.enter), out.local_shape(node), *node.args[2:])
    out.add(node, args)


def _squeeze(out: Localiser, node: Node) -> None:
    """A reshape: a split dim of which the rank has one is not to be squeezed."""
    args = (*map_refs(node.args[:1], out.enter), out.local_shape(node))
    out.add(replace(node, kwargs=()), args, "aten.reshape.default")


def _slice(out: Localiser, node: Node) -> None:
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


def _split(out: Localiser, node: Node) -> None:
    dim = argument(node, 2, "dim", 0)
    sizes = tuple(out.local_shape(node, k)[dim] for k in range(len(node.outputs)))
    first = map_refs(node.args[:1], out.enter)
    op = "aten.split_with_sizes.default"
    out.add(replace(node, kwargs=()), (*first, sizes, dim), op)


def _fresh(out: Localiser, node: Node) -> None:
    """A tensor made from nothing: made whole, then the rank's part is taken."""
    lay = out.sharding.layouts[Ref(node.name)]
    if not lay.is_split:
        out.nodes.append(node)
        return
    whole = replace(node, name=f"{node.name}.whole")
    out.nodes.append(whole)
    ref = Ref(whole.name)
    shape = list(node.spec.shape)
    split = [k for k, dim in enumerate(lay.dims) if any(f.split for f in dim)]
    for dim in split:
        index = lay.index(dim, out.sharding.tp, out.rank)
        shape[dim] = len(index)
        constant = out.constant(f"{node.name}.index{dim}", index)
        name = node.name if dim == split[-1] else f"{node.name}.part{dim}"
        spec = TensorSpec(tuple(shape), node.spec.dtype)
        op = "aten.index_select.default"
        out.nodes.append(replace(node, name=name, op=op, args=(ref, dim, constant), kwargs=(),
                                 outputs=(spec,)))  # fmt: skip
        ref = Ref(name)


def _rows(out: Localiser, table: Ref, dim: int) -> tuple[int, int]:
    """First row of this rank, and the number of all rows, of a table split by rows."""
    lay = out.sharding.layouts[table]
    (factor,) = lay.dims[dim]
    return factor.bounds(out.sharding.tp, out.rank)[0], factor.size


def _embedding(out: Localiser, node: Node) -> None:
    if node.name not in out.sharding.partial:
        out.add(node, map_refs(node.args, out.enter))
        return
    table, ids = node.args[:2]
    start, _ = _rows(out, table, 0)
    padding = argument(node, 2, "padding_idx", -1)
    args = (out.enter(table), out.now.get(ids, ids), start, padding)
    out.add(replace(node, kwargs=()), args, "composite.vocab_parallel_embedding")


def _cross_entropy(out: Localiser, node: Node) -> None:
    if node.name not in out.sharding.partial:
        out.add(node, map_refs(node.args, out.enter))
        return
    logits, target = node.args[:2]
    start, vocabulary = _rows(out, logits, 1)
    rest = (
        argument(node, 3, "reduction", 1),
        argument(node, 4, "ignore_index", -100),
        argument(node, 5, "label_smoothing", 0.0),
    )
    args = (out.enter(logits), out.now.get(target, target), start, vocabulary, *rest)
    out.add(replace(node, kwargs=()), args, "composite.vocab_parallel_cross_entropy")


def _dropout(out: Localiser, node: Node) -> None:
    """The mask of a shard is that part of the whole tensor's mask."""
    x, seed, p, key = node.args[:4]
    factors = [f for dim in out.sharding.layouts[Ref(node.name)].dims for f in dim]
    bounds = [f.bounds(out.sharding.tp, out.rank) for f in factors]
    sizes = tuple(f.size for f in factors)
    starts = tuple(start for start, _ in bounds)
    local = tuple(end - start for start, end in bounds)
    out.add(node, (out.enter(x), seed, p, key, sizes, starts, local))


SPECIAL = {
    "aten.linear.default": _linear,
    "aten.addmm.default": _addmm,
    "aten.convolution.default": _convolution,
    "aten.reshape.default": _shaped,
    "aten.expand.default": _shaped,
    "aten.squeeze.default": _squeeze,
    "aten.squeeze.dim": _squeeze,
    "aten.squeeze.dims": _squeeze,
    "aten.slice.Tensor": _slice,
    "aten.split.Tensor": _split,
    "aten.split_with_sizes.default": _split,
    "aten.embedding.default": _embedding,
    "aten.cross_entropy_loss.default": _cross_entropy,
    "merakc.dropout.default": _dropout,
    **dict.fromkeys(
        (
            "aten.arange.default", "aten.arange.start", "aten.arange.start_step",
            "aten.full.default", "aten.zeros.default", "aten.ones.default",
            "aten.scalar_tensor.default", "aten.new_ones.default", "aten.new_zeros.default",
            "aten.new_full.default",
        ),
        _fresh,
    ),
}  # fmt: skip
