"""The last resort of tensor parallelism: products whose columns are gathered at once.

Where every dim of every parameter is needed whole by some op (a norm behind each layer, gates cut
from one projection), no region of the graph can run on parts. Each rank can still compute its part
of the columns of a product: its weights divide by tp, and an all-gather follows.
"""

from __future__ import annotations

from dataclasses import replace

from merakc.ir.graph import Graph, Node, Ref, map_refs
from merakc.passes.sharding.choose import AT_ANY_PRICE, candidates
from merakc.passes.sharding.propagate import propagate
from merakc.passes.sharding.rules import GATHERED

# The dim of a product's columns.
COLUMNS = {
    "aten.linear.default": -1, "aten.addmm.default": -1, "aten.mm.default": -1,
    "aten.matmul.default": -1, "aten.bmm.default": -1, "aten.convolution.default": 1,
}  # fmt: skip


def gather_products(graph: Graph, tp: int) -> Graph:
    """The same function, with products that can be split where nothing else can.

    The same graph where tp is 1, where a parameter can be split as it is, and where gathering
    does not help.
    """
    if tp == 1 or candidates(propagate(graph), tp, AT_ANY_PRICE):
        return graph
    gathered = gather_all(graph)
    return gathered if candidates(propagate(gathered), tp, AT_ANY_PRICE) else graph


def gather_all(graph: Graph) -> Graph:
    """The graph with a node behind every product, where its columns may be gathered."""
    nodes: list[Node] = []
    whole: dict[Ref, Ref] = {}

    def now(ref: Ref) -> Ref:
        return whole.get(ref, ref)

    for node in graph.nodes:
        kwargs = map_refs(node.kwargs, now)
        nodes.append(replace(node, args=map_refs(node.args, now), kwargs=kwargs))
        if node.op in COLUMNS and node.spec.shape:
            ref, name = Ref(node.name), f"{node.name}.gathered"
            args = (ref, COLUMNS[node.op] % len(node.spec.shape))
            nodes.append(replace(node, name=name, op=GATHERED, args=args, kwargs=()))
            whole[ref] = Ref(name)
    outputs = tuple(o.at(now(o.ref)) for o in graph.outputs)
    return replace(graph, nodes=tuple(nodes), outputs=outputs)


def gathers(graph: Graph) -> bool:
    """Whether products of a graph are gathered."""
    return any(n.op == GATHERED for n in graph.nodes)
