"""Products and the collective beside them in one op: `merakc.kernels.products`.

Where sequences are split, products read what a gather makes whole, and a scatter reads what they
make. Each such collective becomes one op with its products, which is pipelined where GPUs read each
other's memory: rows of one rank are multiplied while those of the next are copied. The graph is one
rank's forward; differentiated, it has the same ops in its backward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from merakc.ir.graph import Graph, Node, Ref, TensorSpec, map_refs
from merakc.kernels.float8.scaled import SCALED_LINEAR
from merakc.passes.overlap.collective_matmul import WEIGHT_POSITION, product_weights

GATHER, SCATTER = "merakc.gather_to.default", "merakc.reduce_scatter.default"
LINEAR, ADDMM = "aten.linear.default", "aten.addmm.default"
GATHER_MATMUL, MATMUL_SCATTER = "merakc.gather_matmul.default", "merakc.matmul_scatter.default"


def fuse_products(local: Graph, weights: Collection[str], kinds: Iterable[Graph] = ()) -> Graph:
    """One rank's forward with the products that read these weights, by their names, in one op with
    the collective beside them.

    A collective stays apart where its ranks' parts differ in size, where one of its products is not
    asked for, and where something else reads what it gathers. So does everything where `kinds`,
    the forwards of ranks whose parts of tensors have other sizes, would not all get the same nodes.
    """
    found = {tuple((n.name, n.op) for n in FusedProducts(k).written(weights).nodes) for k in kinds}
    return FusedProducts(local).written(weights) if len(found) <= 1 else local


@dataclass(frozen=True, slots=True)
class _Site:
    """A collective, and the products that read what it gathers or make what it scatters."""

    collective: Node
    products: tuple[Node, ...]

    @property
    def is_gather(self) -> bool:
        return self.collective.op == GATHER


class FusedProducts:
    """The products of one rank's forward that can share one op with a collective."""

    def __init__(self, local: Graph) -> None:
        self.graph, self.specs, self.users = local, local.specs(), local.users()
        self.weights = product_weights(local)
        self.left = {o.ref for o in local.outputs}

    @cached_property
    def sites(self) -> tuple[_Site, ...]:
        """Every collective that can be in one op with its products; no product is in two."""
        found: list[_Site] = []
        taken: set[str] = set()
        producers = {n.name: n for n in self.graph.nodes}
        for node in self.graph.nodes:
            if node.op == GATHER:
                products = tuple(self.users[node.name])
            elif node.op == SCATTER and node.refs[0].node in producers:
                products = (producers[node.refs[0].node],)
            else:
                continue
            site = _Site(node, products)
            if taken.isdisjoint(p.name for p in products) and self._is_possible(site):
                taken.update(p.name for p in products)
                found.append(site)
        return tuple(found)

    def kinds(self) -> tuple[frozenset[str], ...]:
        """The names of the weights of these products, those together that are alike in all layers
        of a model.
        """
        found: dict[object, set[str]] = {}
        for site in self.sites:
            products = tuple((p.op, self.specs[_weight(p)]) for p in site.products)
            alike = site.collective.op, site.collective.spec, products
            found.setdefault(alike, set()).update(self.weights[p.name] for p in site.products)
        return tuple(frozenset(names) for names in found.values())

    def written(self, weights: Collection[str]) -> Graph:
        """The graph with the products that read these weights in one op with their collectives."""
        chosen = [s for s in self.sites if all(self.weights[p.name] in weights for p in s.products)]
        return _Writer(self.graph, chosen).run() if chosen else self.graph

    def _is_possible(self, site: _Site) -> bool:
        node, products = site.collective, site.products
        ref, _, dim, sizes, _ = node.args
        if not products or len(set(sizes)) > 1 or dim >= len(node.spec.shape) - 1 or not node.grad:
            return False
        if site.is_gather:
            beside = Ref(node.name) not in self.left
        else:
            beside = ref not in self.left and self.users[ref.node] == [node]
            beside &= _bias(products[0]) is None
        turned = {p.op == LINEAR for p in products}
        return beside and len(turned) == 1 and all(self._is_plain(p, site) for p in products)

    def _is_plain(self, product: Node, site: _Site) -> bool:
        """Whether a node is a product of rows with the matrix of a parameter, all of one dtype."""
        if product.name not in self.weights or product.kwargs or not product.grad:
            return False
        if product.op == SCALED_LINEAR:  # torch has no such op of float8 that all machines run
            return False
        rows, weight = _rows(product), _weight(product)
        if site.is_gather and (rows != Ref(site.collective.name) or product.refs.count(rows) > 1):
            return False
        dtypes = {self.specs[rows].dtype, self.specs[weight].dtype, product.spec.dtype}
        return len(dtypes) == 1 and len(self.specs[weight].shape) == 2


def _weight(product: Node) -> Ref:
    ref: Ref = product.args[WEIGHT_POSITION[product.op]]
    return ref


def _rows(product: Node) -> Ref:
    ref: Ref = product.args[WEIGHT_POSITION[product.op] - 1]
    return ref


def _bias(product: Node) -> Ref | None:
    if product.op == ADDMM:
        first: Ref = product.args[0]
        return first
    return product.args[2] if product.op == LINEAR and len(product.args) > 2 else None


class _Writer:
    """Writes the graph. `now` has the values that stand in the place of others."""

    def __init__(self, graph: Graph, sites: Iterable[_Site]) -> None:
        self.graph = graph
        self.nodes: list[Node] = []
        self.written: set[str] = set()
        self.now: dict[Ref, Ref] = {}
        self.gathers: dict[str, _Site] = {}  # by their products
        self.scatters: dict[str, _Site] = {}  # by their collectives
        self.dropped: set[str] = set()
        for site in sites:
            if site.is_gather:
                self.dropped.add(site.collective.name)
                self.gathers |= {p.name: site for p in site.products}
            else:
                self.dropped.update(p.name for p in site.products)
                self.scatters[site.collective.name] = site

    def run(self) -> Graph:
        """The graph."""
        for node in self.graph.nodes:
            if node.name in self.dropped or node.name in self.written:
                continue
            if node.name in self.gathers:
                self._gather(node, self.gathers[node.name])
            elif node.name in self.scatters:
                self._scatter(node, self.scatters[node.name].products[0])
            else:
                self._add(node)
        outputs = tuple(o.at(self._read(o.ref)) for o in self.graph.outputs)
        return replace(self.graph, nodes=tuple(self.nodes), outputs=outputs)

    def _read(self, ref: Ref) -> Ref:
        return self.now.get(ref, ref)

    def _add(self, node: Node) -> None:
        args = map_refs(node.args, self._read)
        kwargs = map_refs(node.kwargs, self._read)
        self.nodes.append(replace(node, args=args, kwargs=kwargs))
        self.written.add(node.name)

    def _gather(self, product: Node, site: _Site) -> None:
        """At the first of its products, all of them; at each its bias."""
        name = f"{site.collective.name}.matmul"
        if name not in self.written:
            self.written.add(name)
            weights = tuple(_weight(p) for p in site.products)
            self._prepare(weights)
            outputs = (site.collective.spec, *(p.spec for p in site.products))
            self._fused(product, name, GATHER_MATMUL, site.collective, weights, outputs)
        at = Ref(name, 1 + site.products.index(product))
        bias = _bias(product)
        if bias is None:
            self.now[Ref(product.name)] = at
        else:
            self._add(replace(product, op="aten.add.Tensor", args=(at, bias)))

    def _prepare(self, weights: Iterable[Ref]) -> None:
        """Adds the views and casts of parameters that stand behind the first product."""
        wanted = {ref.node for ref in weights}
        needed = []
        for node in reversed(self.graph.nodes):
            if node.name in wanted and node.name not in self.written:
                needed.append(node)
                wanted.update(r.node for r in node.refs)
        for node in reversed(needed):
            self._add(node)

    def _scatter(self, collective: Node, product: Node) -> None:
        outputs = (collective.spec,)
        self._fused(product, collective.name, MATMUL_SCATTER, collective, _weight(product), outputs)

    def _fused(
        self, product: Node, name: str, op: str, collective: Node, weights: Ref | tuple[Ref, ...],
        outputs: tuple[TensorSpec, ...],
    ) -> None:  # fmt: skip
        ref, *place = collective.args
        rows = ref if op == GATHER_MATMUL else _rows(product)
        args = (rows, weights, product.op == LINEAR, *place)
        self._add(replace(product, name=name, op=op, args=args, outputs=outputs))
