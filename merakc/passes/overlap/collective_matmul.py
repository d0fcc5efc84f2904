"""Products and the collectives beside them in chunks of rows, the one under the other.

Rows of a product do not depend on each other. Computed in chunks, what one chunk gives is summed,
scattered or gathered over tp while the next is multiplied (Wang et al., "Overlap Communication with
Dependent Computation via Decomposition in Large Deep Learning Models", ASPLOS 2023). Whatever lies
between two such products and mixes no rows either (sums, norms, activations, dropout) is computed
chunk by chunk too, so that a chunk goes on behind its collective while those after it communicate:
from the products behind one attention to those before the next. It needs one sample only, where
`merakc.passes.overlap.sub_batches` needs several.

The rows are found, not named: a dim that collectives carry and no weight of a product has, of
samples or of a sequence. Which nodes keep it apart the sharding rules say, and chunks are to them
what ranks are. The graph is one rank's forward: differentiated, it gives a backward in chunks, the
gradients of weights added up over them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from merakc.analysis.aliases import is_view, view_roots
from merakc.ir.graph import Graph, InputKind, Node, Ref
from merakc.ir.layout import Layout
from merakc.passes.overlap.chunk_writer import (
    COLLECTIVES,
    SHAPED,
    Region,
    draws_apart,
    write_chunks,
)
from merakc.passes.sharding.factors import Factor, atoms, layout, leaves
from merakc.passes.sharding.layouts import Sharding
from merakc.passes.sharding.propagate import propagate
from merakc.passes.sharding.sequences.sequence import MAX_DIMS, Problem

# Where in a product's arguments its weight is.
WEIGHT_POSITION = {
    "aten.linear.default": 1,
    "merakc.scaled_linear.default": 1,
    "aten.addmm.default": 2,
    "aten.mm.default": 1,
    "aten.matmul.default": 1,
}
CASTS = frozenset({"aten.to.dtype", "aten._to_copy.default"})
NOT_SHARDED = Sharding(1, {}, frozenset(), ())


def chunk_rows(local: Graph, chunks: Mapping[str, int], kinds: Iterable[Graph] = ()) -> Graph:
    """One rank's forward with the products that read some weights in chunks of rows.

    `chunks` holds the number of chunks by the weight's name. A product whose rows a collective
    beside it does not carry, or of fewer rows, stays whole. So does everything where `kinds`, the
    forwards of ranks whose parts of tensors have other sizes, would not all get the same nodes:
    ranks must start the same collectives.
    """
    found = {tuple((n.name, n.op) for n in RowChunks(k).written(chunks).nodes) for k in kinds}
    return RowChunks(local).written(chunks) if len(found) <= 1 else local


def product_weights(graph: Graph) -> dict[str, str]:
    """The name of the parameter that each product with one reads, by the product's node."""
    parameters = {i.name: i.target for i in graph.inputs if i.kind is InputKind.PARAMETER}
    roots = view_roots(graph, lambda node, _: is_view(node) or node.op in CASTS)
    found: dict[str, str] = {}
    for node in graph.nodes:
        if node.op in WEIGHT_POSITION:
            weight = node.args[WEIGHT_POSITION[node.op]]
            root = roots.get(weight, weight).node
            if root in parameters:
                found[node.name] = parameters[root]
    return found


class RowChunks:
    """The products of one rank's forward that can be computed in chunks of rows."""

    def __init__(self, local: Graph) -> None:
        self.graph = local
        self.rows = _Rows(local)
        self.users = local.users()

    @cached_property
    def weights(self) -> dict[str, str]:
        """The name of the parameter that each product with one reads, by the product's node."""
        return product_weights(self.graph)

    @cached_property
    def movable(self) -> list[tuple[Factor, frozenset[str]]]:
        """The dims of rows, and the nodes that keep the rows of each apart."""
        factors = self.rows.factors(self.weights)
        return [(factor, self.rows.movable(factor)) for factor in factors]

    def kinds(self, count: int) -> tuple[frozenset[str], ...]:
        """The products that can be computed in so many chunks beside a collective: by the names of
        their weights, those together that are alike in all layers of a model.
        """
        specs = self.graph.specs()
        found: dict[object, set[str]] = {}
        taken: set[str] = set()
        for factor, movable in self.movable:
            if factor.size < count:
                continue
            products = (movable & self.weights.keys()) - taken
            inside = self._region(movable, products)
            for node in self.graph.nodes:
                if node.name in products & inside:
                    readers = tuple(sorted({n.op for n in self.users[node.name]}))
                    alike = node.op, tuple(specs[r] for r in node.refs), readers
                    found.setdefault(alike, set()).add(self.weights[node.name])
                    taken.add(node.name)
        return tuple(frozenset(weights) for weights in found.values())

    def written(self, chunks: Mapping[str, int]) -> Graph:
        """The graph with these products in chunks, by the names of their weights."""
        regions: list[Region] = []
        taken: set[str] = set()
        for factor, movable in self.movable:
            for count in sorted({c for c in chunks.values() if 1 < c <= factor.size}):
                asked = {n for n, w in self.weights.items() if chunks.get(w) == count}
                inside = self._region(movable - taken, asked & movable - taken)
                if inside:
                    taken |= inside
                    regions.append(self._layouts(factor, count, inside))
        return write_chunks(self.graph, regions) if regions else self.graph

    def _region(self, movable: Collection[str], products: Collection[str]) -> frozenset[str]:
        """The products beside collectives, these collectives, and what leads from one to another.

        Other products with weights are left out, and so is what only leads to them.
        """
        free = {n for n in movable if n not in self.weights or n in products}
        collectives = {n for n in free if n in self.rows.collectives}
        stops = collectives | set(products)
        exits = collectives & self._reached(free, products, stops)
        entries = collectives & self._reached(free, products, stops, back=True)
        near = self._reached(free, exits, stops, back=True) | self._reached(free, entries, stops)
        ends = exits | entries | (near & set(products))
        behind = ends | self._reached(free, ends)
        return frozenset(behind & (ends | self._reached(free, ends, back=True)))

    def _reached(
        self,
        free: Collection[str],
        starts: Collection[str],
        stops: Collection[str] = (),
        *,
        back: bool = False,
    ) -> set[str]:
        """The nodes that some lead to through others, or, going back, that lead to them."""
        found: set[str] = set()
        for node in reversed(self.graph.nodes) if back else self.graph.nodes:
            if node.name in free:
                readers = (n.name for n in self.users[node.name])
                for name in readers if back else (r.node for r in node.refs):
                    if name in starts or (name in found and name not in stops):
                        found.add(node.name)
        return found

    def _layouts(self, factor: Factor, count: int, nodes: frozenset[str]) -> Region:
        dims = self.rows.dims
        own = [n for n in self.graph.nodes if n.name in nodes]
        refs = {r for n in own for r in n.refs}
        refs |= {Ref(n.name, k) for n in own for k, o in enumerate(n.outputs) if o is not None}
        layouts = {ref: layout(dims.of[ref], dims.shapes[ref], {factor}) for ref in refs}
        return Region(count, nodes, layouts)


class _Rows(Problem):
    """Which nodes of one rank's forward keep the rows of a dim apart."""

    def __init__(self, local: Graph) -> None:
        super().__init__(propagate(_plain(local)), NOT_SHARDED, set())
        self.local = local
        self.collectives = {n.name for n in local.nodes if n.op in COLLECTIVES}

    def splits(self, ref: Ref) -> bool:
        """Nothing is split over tp any more: the graph is one rank's."""
        return False

    def factors(self, products: Collection[str]) -> list[Factor]:
        """The dims that collectives carry and no weight of these products has, those of most bytes
        first.
        """
        held: set[Factor] = set()
        sizes: Counter[Factor] = Counter()
        for node in self.local.nodes:
            if node.name in products:
                weight = node.args[WEIGHT_POSITION[node.op]]
                held.update(f for dim in self.dims.of[weight] for f in atoms(dim))
        for node in self.local.nodes:
            if node.op in COLLECTIVES:
                kept = {f for dim in self.dims.of[Ref(node.name)] for f in leaves(dim)}
                for dim in self.dims.of[node.refs[0]]:
                    for factor in leaves(dim):
                        if factor in kept and factor not in held and factor.size > 1:
                            sizes[factor] += node.spec.size_bytes
        return [factor for factor, _ in sizes.most_common(MAX_DIMS)]

    def movable(self, factor: Factor) -> frozenset[str]:
        """The nodes that give a chunk of their result from chunks of what they read."""
        return frozenset(n.name for n in self.local.nodes if self._is_movable(n, factor))

    def _is_movable(self, node: Node, factor: Factor) -> bool:
        places = [self.place(ref, factor) for ref in node.refs]
        if all(place is None for place in places):
            return False
        if node.op in COLLECTIVES:
            out = Ref(node.name)
            return out in self.grads and self.place(out, factor) is not None
        if not self.may_be_inside(node, factor):
            return False
        own = self._layout(Ref(node.name), factor)
        # Scores of one sequence have it in two dims, of which one may be joined with others.
        every = (own, *(self._layout(ref, factor) for ref in node.refs))
        once = all(sum(any(f.split for f in dim) for dim in lay.dims) <= 1 for lay in every)
        return once and draws_apart(node, own)

    def _layout(self, ref: Ref, factor: Factor) -> Layout:
        return layout(self.dims.of[ref], self.dims.shapes[ref], {factor})


def _plain(local: Graph) -> Graph:
    """The graph with ops that have sharding rules in the place of collectives.

    What is gathered from equal parts is these, one after the other; where the parts differ, nothing
    is known of its dims.
    """
    specs = local.specs()
    nodes: list[Node] = []
    for node in local.nodes:
        if node.op not in COLLECTIVES:
            nodes.append(node)
        elif node.op not in SHAPED:
            nodes.append(replace(node, op="aten.neg.default", args=node.args[:1]))
        elif len(set(node.args[3])) == 1:
            nodes += _in_parts(node, specs[node.args[0]].shape)
        else:
            nodes.append(node)
    return replace(local, nodes=tuple(nodes))


def _in_parts(node: Node, shape: tuple[int, ...]) -> list[Node]:
    """A gather as copies of a part, or a scatter as the choice of one."""
    ref, _, dim, sizes, rank = node.args
    tp = len(sizes)
    made: list[tuple[str, tuple[Any, ...], tuple[int, ...]]]
    if SHAPED[node.op]:
        copies = (*shape[:dim], tp, *shape[dim:])
        one = (*shape[:dim], 1, *shape[dim:])
        made = [("aten.unsqueeze.default", (ref, dim), one),
                ("aten.expand.default", (Ref(f"{node.name}#0"), copies), copies),
                ("aten.reshape.default", (Ref(f"{node.name}#1"), node.spec.shape), ())]  # fmt: skip
    else:
        parts = (*shape[:dim], tp, sizes[rank], *shape[dim + 1 :])
        made = [("aten.reshape.default", (ref, parts), parts),
                ("aten.select.int", (Ref(f"{node.name}#0"), dim, rank), ())]  # fmt: skip
    found = []
    for k, (op, args, own) in enumerate(made):
        last = k == len(made) - 1
        spec = node.spec if last else node.spec._replace(shape=own)
        name = node.name if last else f"{node.name}#{k}"
        found.append(replace(node, name=name, op=op, args=args, kwargs=(), outputs=(spec,)))
    return found
