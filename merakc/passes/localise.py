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
from merakc.passes.localise_ops import SPECIAL
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
