"""The last resort of tensor parallelism: products whose columns are gathered at once.

Where every dim of every parameter is needed whole by some op (a norm behind each layer, gates cut
from one projection), no region of the graph can run on parts. Each rank can still compute its part
of the columns of a product: its weights divide by tp, and an all-gather follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from merakc.ir.graph import Graph, Node, Ref, map_refs
from merakc.ir.layout import Layout
from merakc.passes.sharding.choose import may_be_split, needed_whole, planned_factors
from merakc.passes.sharding.factors import atoms
from merakc.passes.sharding.propagate import propagate
from merakc.passes.sharding.rules import GATHERED

# The dim of a product's columns.
COLUMNS = {
    "aten.linear.default": -1, "aten.addmm.default": -1, "aten.mm.default": -1,
    "aten.matmul.default": -1, "aten.bmm.default": -1, "aten.convolution.default": 1,
    "merakc.scaled_linear.default": -1,
}  # fmt: skip


def gather_products(graph: Graph, tp: int) -> Graph:
    """The same function, with products that can be split where nothing else can.

    The same graph where tp is 1, where a parameter can be split as it is, and where gathering
    does not help.
    """
    if tp == 1 or may_be_split(graph.told(propagate), tp):
        return graph
    gathered = gather_all(graph)
    return gathered if may_be_split(gathered.told(propagate), tp) else graph


def gather_needed(graph: Graph, splits: Mapping[str, Layout]) -> Graph:
    """The same function, with those products gathered of which a plan splits columns that the
    graph needs whole: the logits of a head, for a loss that the plan was made without.
    """
    dims = graph.told(propagate)
    whole = needed_whole(dims, planned_factors(dims, splits))

    def is_needed(node: Node) -> bool:
        return any(f in whole for f in atoms(dims.of[Ref(node.name)][COLUMNS[node.op]]))

    return gather_all(graph, is_needed)


def gather_all(graph: Graph, among: Callable[[Node], bool] = lambda node: True) -> Graph:
    """The graph with a node behind every product, or those `among` them, where its columns may be
    gathered.
    """
    nodes: list[Node] = []
    whole: dict[Ref, Ref] = {}

    def now(ref: Ref) -> Ref:
        return whole.get(ref, ref)

    for node in graph.nodes:
        kwargs = map_refs(node.kwargs, now)
        nodes.append(replace(node, args=map_refs(node.args, now), kwargs=kwargs))
        if node.op in COLUMNS and node.spec.shape and among(node):
            ref, name = Ref(node.name), f"{node.name}.gathered"
            args = (ref, COLUMNS[node.op] % len(node.spec.shape))
            nodes.append(replace(node, name=name, op=GATHERED, args=args, kwargs=()))
            whole[ref] = Ref(name)
    outputs = tuple(o.at(now(o.ref)) for o in graph.outputs)
    return replace(graph, nodes=tuple(nodes), outputs=outputs)


def gathers(graph: Graph) -> bool:
    """Whether all products of a graph are gathered."""
    products = [n for n in graph.nodes if n.op in COLUMNS and n.spec.shape]
    gathered = [n for n in graph.nodes if n.op == GATHERED]
    return 0 < len(products) == len(gathered)
