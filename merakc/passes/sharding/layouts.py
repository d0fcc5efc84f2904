"""Tensor and context parallelism, decided: which dims of which values are split over tp, and cp."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field, fields, replace
from typing import Any

from merakc.ir.graph import Graph, InputKind, Node, Ref, TensorSpec
from merakc.ir.layout import DimFactor, Layout


def unsplit(graph: Graph) -> Sharding:
    """How a graph's values lie on a rank that has all of them."""
    layouts = {
        ref: Layout(tuple([(DimFactor(n),) for n in spec.shape]))
        for ref, spec in graph.specs().items()
    }
    return Sharding(1, layouts, frozenset(), ())


@dataclass(frozen=True, slots=True)
class Dispatched:
    """What of a block of experts (`merakc.passes.sharding.experts.blocks`) runs where these are.

    That is the `nodes`; the results of `exits` go back. The block's `sorted_rows` are sent there,
    and the `ends` of its groups are told. `experts` are those of each rank, `rows` those that a
    rank is taken to get.
    """

    nodes: frozenset[str]
    exits: frozenset[str]
    sorted_rows: frozenset[Ref]
    ends: Ref
    experts: tuple[int, ...]
    rows: int


@dataclass(frozen=True, slots=True)
class RingSplit:
    """How ranks pass the keys and values of an attention around: behind which `hops` each has the
    blocks that its queries attend to; whether later halves of rows are `swapped` for it; whether
    no row sees a later one, as a mask may say, too (`merakc.kernels.ring`).
    """

    hops: tuple[int, ...]
    swapped: bool
    causal: bool


@dataclass(frozen=True)
class SequenceSplit:
    """A part of the graph that runs on parts of sequences (arXiv 2205.05198, section 4.2).

    The `nodes` compute on a rank's part; `kept` are the values of which a rank has only that, also
    where other nodes read them; `layouts` those of all values that the nodes read or write. `whole`
    says which of its nodes need which arguments whole. The nodes `counting` are made from
    the number of a rank's own rows; those of `dispatched` compute where the experts are. The nodes
    `exchanged` would need something whole on parts of a sequence, and have parts of heads here; to
    those of `rings` it comes part by part.
    """

    nodes: frozenset[str]
    kept: frozenset[Ref]
    layouts: Mapping[Ref, Layout]
    whole: frozenset[tuple[str, Ref]] = frozenset()
    counting: frozenset[str] = frozenset()
    dispatched: tuple[Dispatched, ...] = ()
    exchanged: frozenset[str] = frozenset()
    rings: Mapping[str, RingSplit] = field(default_factory=dict)


@dataclass(frozen=True)
class Sharding:
    """Which dims of which values are split over the `tp` ranks of an axis; the same on every rank.

    `layouts` are those that nodes outside of all `sequences` see. `partial` names the nodes whose
    results are partial sums. `opaque` are the nodes without a rule, kept whole. The parameters
    `gathered` are read whole, though ranks have parts of them. Of the values `sums` each rank makes
    a part of the gradient (`merakc.passes.sharding.sequences.gradient_sums`), which are added up
    elsewhere. `context` says how the ranks of cp share what is then split over tp: a rank's lane is
    its place on tp, and `tp` times that on cp.
    """

    tp: int
    layouts: Mapping[Ref, Layout]
    partial: frozenset[str]
    opaque: tuple[Node, ...]
    sequences: tuple[SequenceSplit, ...] = ()
    gathered: frozenset[Ref] = frozenset()
    sums: frozenset[Ref] = frozenset()
    context: Sharding | None = None

    @property
    def lanes(self) -> int:
        """How many ranks share the graph."""
        return self.tp * self.cp

    @property
    def cp(self) -> int:
        """How many of them have parts of sequences, for each of tp."""
        return self.context.tp if self.context else 1

    @property
    def is_split(self) -> bool:
        """Whether any value is, or a gradient made in parts."""
        return bool(self.sequences or self.sums) or any(
            lay.is_split for lay in self.layouts.values()
        )

    def unlike_lanes(self, graph: Graph) -> tuple[int, ...]:
        """One lane for each set of sizes that the parts of a graph's values have: (0,) where all
        dims divide evenly.
        """
        along = self.context._unlike(graph) if self.context else (0,)
        return tuple(c * self.tp + t for c in along for t in self._unlike(graph))

    def _unlike(self, graph: Graph) -> tuple[int, ...]:
        refs = graph.specs()
        every = [self.layouts, *(s.layouts for s in self.sequences)]
        split = dict.fromkeys(
            layouts[r] for layouts in every for r in refs if r in layouts and layouts[r].is_split
        )
        found: dict[tuple[tuple[int, ...], ...], int] = {}
        for rank in range(self.tp):
            found.setdefault(tuple(lay.local_shape(self.tp, rank) for lay in split), rank)
        return tuple(found.values())

    def sequence_of(self, ref: Ref) -> SequenceSplit | None:
        """The sequence split that a value is kept in."""
        return next((s for s in self.sequences if ref in s.kept), None)

    def layout_of(self, ref: Ref) -> Layout:
        """How a value is kept over the axis itself."""
        part = self.sequence_of(ref)
        return part.layouts[ref] if part else self.layouts[ref]

    def local_spec(self, ref: Ref, spec: TensorSpec, lane: int) -> TensorSpec:
        """The spec of what a lane keeps of a value."""
        lay = self.layout_of(ref)
        own = TensorSpec(lay.local_shape(self.tp, lane % self.tp), spec.dtype)
        if self.context is None:
            return own
        return _both(spec, own, self.context.local_spec(ref, spec, lane // self.tp))

    def weight_layout(self, ref: Ref) -> Layout:
        """How a parameter or buffer is split: over tp, or, of experts, over cp, or both."""
        own, along = self.layouts[ref], self.context
        if along is None or not along.has_experts:
            return own
        of_experts = along.layouts[ref]
        return of_experts.crossed(own, along.tp, self.tp) if self.tp > 1 else of_experts

    @property
    def has_experts(self) -> bool:
        """Whether ranks have parts of weights of which they compute on parts of sequences."""
        return bool(self.gathered) or any(s.dispatched for s in self.sequences)

    def sequence_with(self, name: str) -> SequenceSplit | None:
        """The sequence split that a node runs in: of tp, or of cp."""
        along = self.context.sequences if self.context else ()
        return next((s for s in (*along, *self.sequences) if name in s.nodes), None)

    def node_specs(
        self, node: Node, specs: Mapping[Ref, TensorSpec], lane: int
    ) -> dict[Ref, TensorSpec]:
        """The specs of what the node reads and writes, as a lane computes them."""
        own = self._node_specs(node, specs, lane % self.tp)
        if self.context is None:
            return own
        along = self.context._node_specs(node, specs, lane // self.tp)
        return {ref: _both(specs[ref], spec, along[ref]) for ref, spec in own.items()}

    def _node_specs(
        self, node: Node, specs: Mapping[Ref, TensorSpec], rank: int
    ) -> dict[Ref, TensorSpec]:
        part = next((s for s in self.sequences if node.name in s.nodes), None)
        within = {} if part is None else part.layouts
        whole = {r for r in node.refs if part is not None and (node.name, r) in part.whole}
        if part is not None and node.name in part.rings:  # keys and values come, one by one
            whole.update(node.args[1:3])
        outs = (Ref(node.name, k) for k, o in enumerate(node.outputs) if o is not None)
        found = {}
        for ref in (*node.refs, *outs):
            lay = within[ref] if ref in within and ref not in whole else self.layouts[ref]
            found[ref] = TensorSpec(lay.local_shape(self.tp, rank), specs[ref].dtype)
        return found

    def told(self) -> str:
        """All of it, in the same words wherever it is the same."""
        split = [f"{ref} {lay}" for ref, lay in self.layouts.items() if lay.is_split]
        opaque = [node.name for node in self.opaque]
        along = self.context.told() if self.context else ""
        return _told(
            (sorted(split), self.partial, opaque, self.sequences, self.gathered, self.sums, along)
        )

    def renamed(self, names: Mapping[Ref, Ref]) -> Sharding:
        """The same sharding, with values also known by other names."""
        also = tuple(
            replace(
                s,
                kept=s.kept | {new for old, new in names.items() if old in s.kept},
                layouts={
                    **s.layouts,
                    **{n: s.layouts[o] for o, n in names.items() if o in s.layouts},
                },
                whole=s.whole | {(node, names[ref]) for node, ref in s.whole if ref in names},
            )
            for s in self.sequences
        )
        layouts = {**self.layouts, **{n: self.layouts[o] for o, n in names.items()}}
        sums = self.sums | {new for old, new in names.items() if old in self.sums}
        along = self.context.renamed(names) if self.context else None
        return replace(self, layouts=layouts, sequences=also, sums=sums, context=along)

    def exchanged(self, graph: Graph) -> Iterator[Node]:
        """The nodes of a graph that have parts of heads in the place of parts of sequences."""
        along = self.context.sequences if self.context else ()
        names = frozenset[str]().union(*(split.exchanged for split in along))
        return (node for node in graph.nodes if node.name in names)

    def rings(self, graph: Graph) -> Iterator[Node]:
        """The nodes of a graph to which keys and values are passed around."""
        along = self.context.sequences if self.context else ()
        names = frozenset[str]().union(*(split.rings for split in along))
        return (node for node in graph.nodes if node.name in names)

    def evened(self, node: Node) -> Node:
        """A node that takes as long as this one does: where causal rows are swapped, no rank has
        more to do than others.
        """
        along = self.context.sequences if self.context else ()
        ring = next((s.rings[node.name] for s in along if node.name in s.rings), None)
        if ring is None or not ring.swapped:
            return node
        return replace(node, args=(*node.args[:4], False, *node.args[5:]))

    def splits(self, graph: Graph) -> dict[str, Layout]:
        """The layouts of the split parameters and buffers, by the user's names."""
        kinds = (InputKind.PARAMETER, InputKind.BUFFER)
        found = {i.target: self.weight_layout(Ref(i.name)) for i in graph.inputs if i.kind in kinds}
        return {name: lay for name, lay in found.items() if lay.is_split}

    def of_experts(self, graph: Graph) -> frozenset[str]:
        """The parameters of which ranks of experts have parts of their own."""
        if self.context is None or not self.context.has_experts:
            return frozenset()
        return frozenset(replace(self.context, context=None).splits(graph))

    def tp_splits(self, graph: Graph) -> dict[str, Layout]:
        """The same, of what is split over tp alone."""
        return replace(self, context=None).splits(graph)

    def whole_ops(self, graph: Graph) -> tuple[str, ...]:
        """The ops on trained values that each rank computes whole for want of a rule, by line."""
        grads = graph.grad_values()
        trained = [n for n in self.opaque if not grads.isdisjoint(n.refs)]
        return tuple(dict.fromkeys(f"{n.op} at {n.source}" for n in trained))


def _both(whole: TensorSpec, one: TensorSpec, other: TensorSpec) -> TensorSpec:
    """What is left of a value of which both parts are taken: of no dim of both, but for factors of
    it that do not meet.
    """
    dims = zip(whole.shape, one.shape, other.shape, strict=True)
    return TensorSpec(tuple(a * b // n if n else 0 for n, a, b in dims), whole.dtype)


def _told(value: Any) -> str:
    """What sets and mappings hold comes in an order that is not that of any process."""
    if isinstance(value, Set):
        return f"{{{', '.join(sorted(map(_told, value)))}}}"
    if isinstance(value, Mapping):
        return _told(frozenset(value.items()))
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return f"[{', '.join(map(_told, value))}]"
    if isinstance(value, (SequenceSplit, Dispatched)):
        return _told([getattr(value, own.name) for own in fields(value)])
    return str(value)
