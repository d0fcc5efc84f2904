"""The graph of one lane, a rank of tp and cp, with its collectives as nodes.

Where a split factor is summed, the partial sums are all-reduced; where a value that is not split
enters an op that is, its gradient is. These are Megatron's conjugate pair f and g (arXiv
1909.08053, section 3): `merakc.copy_to` (identity, all-reduce backward) and `merakc.all_reduce`
(identity backward), so that differentiating the rewritten graph gives the backward with its
collectives. Where a sequence is split in between, `merakc.reduce_scatter` and `merakc.gather_to`
stand in their place. Of the values in `sums` gradients stay each rank's parts.
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
from merakc.passes.sharding.carry import carried
from merakc.passes.sharding.experts.writer import ExpertWriter
from merakc.passes.sharding.layouts import SequenceSplit, Sharding
from merakc.passes.sharding.propagate import copies
from merakc.passes.sharding.rules import GATHERED
from merakc.passes.sharding.sequences.exchange import (
    before_repeats,
    can_exchange,
    can_open,
    exchange_nodes,
    scatter_nodes,
)
from merakc.passes.sharding.sequences.ring_nodes import write_ring
from merakc.passes.sharding.spmd_ops import SPECIAL

SCATTERS = ("scatter", "reduce_scatter")


def spmd_partition(graph: Graph, sharding: Sharding, lane: int) -> Graph:
    """The graph of one lane: local shapes, local constants, collectives. What ranks of cp share is
    split first; what is left over tp.
    """
    if sharding.context is not None:
        part = _along(graph, sharding.context, lane // sharding.tp, "cp")
        if sharding.tp == 1:
            return part
        within = carried(graph, sharding, part)
        local = _along(part, within, lane % sharding.tp, "tp", mark="tp.")
        local.verify()  # no two nodes have one name, whatever both passes have made
        return local
    return _along(graph, sharding, lane, "tp")


def _along(graph: Graph, sharding: Sharding, rank: int, axis: str, mark: str = "") -> Graph:
    """The graph of a rank of one axis; a `mark` is in the names of the nodes that it adds."""
    return SpmdPartitioner(graph, sharding, rank, axis, mark).run() if sharding.is_split else graph


class SpmdPartitioner(ExpertWriter):
    """Writes one rank's graph. `sharding` has the layouts that the node being written sees."""

    def __init__(
        self, graph: Graph, sharding: Sharding, rank: int, axis: str, mark: str = ""
    ) -> None:
        self.graph, self.whole, self.rank, self.axis = graph, sharding, rank, axis
        self.mark = mark
        self.sharding = sharding
        self.node = ""  # that is being written
        self.within: SequenceSplit | None = None  # where it is
        self.specs = graph.specs()
        self.grads = graph.grad_values()
        self.nodes: list[Node] = []
        self.made: set[str] = set()  # the names of gathers and scatters
        self.constants: dict[str, torch.Tensor] = {}
        self.inputs: list[Input] = []
        self.now: dict[Ref, Ref] = {}  # values replaced by another
        self.entered: dict[Ref, Ref] = {}  # values behind their copy_to
        self.shared: dict[Ref, Ref] = {}  # and behind what makes their gradient one of as many
        self.moved: dict[tuple[Ref, str, Layout], Ref] = {}  # and behind gathers and scatters
        self.maker = {n.name: n for n in graph.nodes}
        self.repeated: dict[Ref, Ref] = {}  # values that were gathered before they were repeated
        self.dispatched = {n: d for s in sharding.sequences for d in s.dispatched for n in d.nodes}
        self.sent: dict[Ref, Ref] = {}  # values where the experts are

    def run(self) -> Graph:
        """The local graph."""
        for item in self.graph.inputs:
            spec = self.whole.local_spec(Ref(item.name), item.spec, self.rank)
            self.inputs.append(replace(item, spec=spec))
            if item.name in self.graph.constants:
                full = self.graph.constants[item.name]
                own = self.whole.layouts[Ref(item.name)]
                self.constants[item.name] = own.take(full, self.whole.tp, self.rank)
        for ref in (Ref(i.name) for i in self.graph.inputs):  # in one order on all ranks
            if ref in self.whole.gathered:
                self.now[ref] = self.move(ref, self.whole.layouts[ref], "all_gather")
        homes = {name: split for split in self.whole.sequences for name in split.nodes}
        inside = {
            id(s): replace(self.whole, layouts={**self.whole.layouts, **s.layouts})
            for s in self.whole.sequences
        }
        for node in self.graph.nodes:
            self.within = homes.get(node.name)
            self.sharding = inside[id(self.within)] if self.within else self.whole
            self.write(node)
        self.sharding = self.whole
        outputs = tuple(self.output(o) for o in self.graph.outputs)
        inputs, constants = tuple(self.inputs), self.constants
        made = Graph(inputs, tuple(self.nodes), outputs, constants, self.graph.functions)
        return made.pruned() if self.repeated else made

    def is_split(self, ref: Ref) -> bool:
        """Whether a value is split, as the node being written sees it."""
        return ref not in self.whole.gathered and self.sharding.layouts[ref].is_split

    def local_spec(self, ref: Ref) -> TensorSpec:
        """Shape and dtype of this rank's part of a value, as the node being written sees it."""
        shape = self.sharding.layouts[ref].local_shape(self.sharding.tp, self.rank)
        return TensorSpec(shape, self.specs[ref].dtype)

    def local_shape(self, node: Node, index: int = 0) -> tuple[int, ...]:
        """The local shape of one of the node's outputs."""
        return self.local_spec(Ref(node.name, index)).shape

    def read(self, ref: Ref) -> Ref:
        """A value as a node reads it that is the same on every rank."""
        return self.once(ref) if ref in self.whole.sums else self.as_it_is(ref)

    def as_it_is(self, ref: Ref) -> Ref:
        """A whole value, and its gradient as it comes."""
        split = self.whole.sequence_of(ref)
        return self.move(ref, split.layouts[ref], "all_gather") if split else self.now.get(ref, ref)

    def once(self, ref: Ref) -> Ref:
        """One of the `sums`, as what every rank computes whole reads it: the gradients of all ranks
        add up to one.
        """
        if ref not in self.shared:
            name, spec = self.named(ref, "once"), self.specs[ref]
            args = (self.as_it_is(ref), self.whole.tp)
            self.nodes.append(Node(name, "merakc.divide_gradient.default", args, (), (spec,)))
            self.shared[ref] = Ref(name)
        return self.shared[ref]

    def enter(self, ref: Ref) -> Ref:
        """A value as a node on split dims reads it: its gradient there is a partial sum."""
        split, within = self.whole.sequence_of(ref), self.within
        if within is not None and ref in within.layouts and (self.node, ref) not in within.whole:
            if split is within:
                return self.now.get(ref, ref)
            pair = split and (split.layouts[ref], within.layouts[ref])
            if self.axis == "cp" and pair and can_exchange(*pair):
                return self.exchanged(ref, *pair)
            return self.move(ref, within.layouts[ref], "scatter")
        if split is not None:
            return self.gathered(ref, split)
        ref_now = self.now.get(ref, ref)
        is_left = ref not in self.grads or ref in self.whole.sums
        if self.whole.layouts[ref].is_split or is_left:
            return ref_now
        if ref not in self.entered:
            name, spec = self.named(ref, "copy_to"), self.specs[ref]
            self.nodes.append(
                Node(name, "merakc.copy_to.default", (ref_now, self.axis), (), (spec,))
            )
            self.entered[ref] = Ref(name)
        return self.entered[ref]

    def gathered(self, ref: Ref, split: SequenceSplit) -> Ref:
        """A value of which ranks have parts, whole, as nodes on other parts read it: what repeats a
        smaller value is made of that one, gathered.
        """
        source, chain = before_repeats(ref, self.maker)
        if source not in split.kept or self.specs[source].numel >= self.specs[ref].numel:
            return self.move(ref, split.layouts[ref], "gather_to")
        now = self.move(source, split.layouts[source], "gather_to")
        for node in reversed(chain):
            own = Ref(node.name)
            if own not in self.repeated:
                name = self.named(own, "whole")
                self.nodes.append(replace(node, name=name, args=(now, *node.args[1:])))
                self.repeated[own] = Ref(name)
            now = self.repeated[own]
        return now

    def write(self, node: Node) -> None:
        """Adds the local form of a node."""
        self.node = node.name
        if node.name in self.dispatched:
            self.write_dispatched(node, self.dispatched[node.name])
            return
        if self.is_stack(node):
            self.write_stack(node)
            return
        if self.within is not None and node.name in self.within.rings:
            write_ring(self, node, self.within.rings[node.name])
            return
        if node.op == GATHERED and self.axis == "tp":
            self.gather(node)
            return
        outs = [Ref(node.name, k) for k, o in enumerate(node.outputs) if o is not None]
        if not any(self.is_split(r) for r in (*node.refs, *outs)):
            is_counted = not self.whole.sums.issuperset(self.grads.intersection(outs))
            read = self.read if is_counted else self.as_it_is
            self.add(node, map_refs(node.args, read), kwargs=map_refs(node.kwargs, read))
            return
        special = SPECIAL.get(node.op)
        if self.within is not None and node.name in self.within.counting:
            own = self.local_shape(node)
            listed = isinstance(node.args[0], tuple)
            self.add(node, (own, *node.args[1:]) if listed else own)
        elif node.name in self.graph.told(copies):
            lay = self.sharding.layouts[outs[0]]
            self.now[outs[0]] = self.move(node.args[0], lay, "scatter")
        elif special is not None:
            special(self, node)
        else:
            args = map_refs(node.args, self.enter)
            if node.name in self.sharding.partial:
                self.add_sum(node, node.op, args)
            else:
                self.add(node, args)

    def gather(self, node: Node) -> None:
        """A product that is whole behind its gather; nothing where its columns are not split."""
        ref, dim = node.args
        lay, whole = self.sharding.layouts[ref], Ref(node.name)
        is_split = any(f.split for f in lay.dims[dim])
        self.now[whole] = self.move(ref, lay, "all_gather") if is_split else self.now.get(ref, ref)

    def add(self, node: Node, args: Any, op: str | None = None, *, kwargs: Any = None) -> None:
        """Adds a node under its own name with local outputs."""
        kwargs = map_refs(node.kwargs, self.enter) if kwargs is None else kwargs
        outputs = tuple(
            None if o is None else self.local_spec(Ref(node.name, k))
            for k, o in enumerate(node.outputs)
        )
        self.nodes.append(
            replace(node, op=op or node.op, args=args, kwargs=kwargs, outputs=outputs)
        )

    def add_sum(self, node: Node, op: str, args: Any) -> Ref:
        """Adds a node that leaves partial sums, and their sum: whole, or this rank's part of it."""
        self.add(node, args, op)
        ref = Ref(node.name)
        split = self.whole.sequence_of(ref)
        if split is not None:
            self.now[ref] = self.move(ref, split.layouts[ref], "reduce_scatter")
            return self.now[ref]
        name = self.named(ref, "all_reduce")
        reduced = replace(
            node,
            name=name,
            op="merakc.all_reduce.default",
            args=(ref, self.axis, "sum"),
            kwargs=(),
            outputs=(self.nodes[-1].spec,),
        )
        self.nodes.append(reduced)
        self.now[ref] = Ref(name)
        return Ref(name)

    def move(self, ref: Ref, lay: Layout, op: str) -> Ref:
        """A value behind the gathers or scatters of the dims that `lay` splits; made once."""
        if (ref, op, lay) not in self.moved:
            source = ref if op == "reduce_scatter" else self.read_or_kept(ref, op)
            full = lay.shape if op in SCATTERS else lay.local_shape(self.whole.tp, self.rank)
            spec = TensorSpec(full, self.specs[ref].dtype)
            for dim, factors in enumerate(lay.dims):
                if any(f.split for f in factors):
                    source, spec = self.collective(source, spec, op, lay, dim)
            self.moved[ref, op, lay] = source
        return self.moved[ref, op, lay]

    def exchanged(self, ref: Ref, source: Layout, target: Layout) -> Ref:
        """A value of which ranks have parts of one dim, behind the exchange for parts of another;
        made once.
        """
        if (ref, "exchange", target) not in self.moved:
            name = self.named(ref, "exchange")
            while name in self.made:
                name += "+"
            self.made.add(name)
            now, place = self.now.get(ref, ref), (self.axis, self.whole.tp, self.rank)
            nodes = exchange_nodes(now, name, self.specs[ref].dtype, (source, target), place)
            self.nodes += nodes
            self.moved[ref, "exchange", target] = Ref(nodes[-1].name)
        return self.moved[ref, "exchange", target]

    def read_or_kept(self, ref: Ref, op: str) -> Ref:
        """The value that a gather or scatter reads: this rank's part, or the whole."""
        return self.read(ref) if op in SCATTERS else self.now.get(ref, ref)

    def collective(
        self, ref: Ref, spec: TensorSpec, op: str, lay: Layout, dim: int
    ) -> tuple[Ref, TensorSpec]:
        """A gather of one dim in the full tensor's order, or a scatter of it from there."""
        sizes, order = lay.order(dim, self.whole.tp)
        name = self.named(ref, f"{op}{dim}")
        while name in self.made:  # scattered for several sequences
            name += "+"
        self.made.add(name)
        if order is not None and op == "scatter" and can_open(lay, dim):
            place = (self.axis, self.whole.tp, self.rank)
            self.nodes += scatter_nodes(ref, name, spec, lay, dim, place)
            return Ref(name), self.nodes[-1].spec
        if order is not None and op in SCATTERS:
            ref = self.pick(ref, spec, dim, f"{name}.ordered", order)
        shape = list(spec.shape)
        shape[dim] = sizes[self.rank] if op in SCATTERS else sum(sizes)
        spec = TensorSpec(tuple(shape), spec.dtype)
        args = (ref, self.axis, dim, sizes, self.rank)
        self.nodes.append(Node(name, f"merakc.{op}.default", args, (), (spec,)))
        if order is None or op in SCATTERS:
            return Ref(name), spec
        return self.pick(Ref(name), spec, dim, f"{name}.ordered", order.argsort()), spec

    def pick(self, ref: Ref, spec: TensorSpec, dim: int, name: str, order: torch.Tensor) -> Ref:
        """A dim in another order."""
        constant = self.constant(f"{name}.order", order)
        op = "aten.index_select.default"
        self.nodes.append(Node(name, op, (ref, dim, constant), (), (spec,)))
        return Ref(name)

    def add_bias(self, node: Node, total: Ref, bias: Ref | None, view: tuple[int, ...]) -> None:
        """Adds the bias of a product after its sum, once."""
        if bias is None:
            return
        ref = Ref(node.name)
        self.within = self.whole.sequence_of(ref)  # of the sum: its bias goes with it
        if self.within and bias in self.within.layouts:
            own = self.within.layouts[bias].local_shape(self.whole.tp, self.rank)
            view = (*own, *view[1:])
        bias = self.enter(bias) if self.within else self.read(bias)
        if len(view) > 1:
            shape = TensorSpec(view, node.spec.dtype)
            name = self.named(ref, "bias_view")
            self.nodes.append(
                replace(node, name=name, op="aten.reshape.default", args=(bias, view), kwargs=(),
                        outputs=(shape,))
            )  # fmt: skip
            bias = Ref(name)
        name = self.named(ref, "bias")
        spec = self.whole.local_spec(ref, node.spec, self.rank)
        self.nodes.append(
            replace(node, name=name, op="aten.add.Tensor", args=(total, bias), kwargs=(),
                    outputs=(spec,))
        )  # fmt: skip
        self.now[ref] = Ref(name)

    def output(self, out: Output) -> Output:
        """An output; what the user reads is gathered whole, and so are the waist, and a buffer that
        parts of a sequence are written to.
        """
        if out.kind.begins_gradients and out.ref in self.whole.sums:
            return out.at(self.once(out.ref))
        if out.kind is OutputKind.BUFFER:
            return out.at(self.as_it_is(out.ref))
        if out.kind not in (OutputKind.RESULT, OutputKind.WAIST):
            return out.at(self.now.get(out.ref, out.ref))
        if not self.is_split(out.ref):
            return out.at(self.as_it_is(out.ref))
        return out.at(self.move(out.ref, self.sharding.layouts[out.ref], "all_gather"))

    def named(self, ref: Ref, what: str) -> str:
        """The name of a node that makes something of a value: no other of the graph has it."""
        index = f"{ref.index}." if ref.index else ""
        return f"{ref.node}.{index}{self.mark}{what}"

    def constant(self, name: str, value: torch.Tensor) -> Ref:
        """A new constant input."""
        spec = TensorSpec(tuple(value.shape), value.dtype)
        self.inputs.append(Input(name, InputKind.CONSTANT, spec))
        self.constants[name] = value
        return Ref(name)
