"""Writes what stands around groups of rows in the forms in which blocks are looked for.

Calls that give the same are written as one: an order alone as a sort with its order, rows that are
selected as rows that are read by places. And where the groups of a product end is counted from the
sorted numbers, for the product alone: loops count the unsorted ones too, and read the same counts
for the loss of their router, from which the rows that other ranks send must stay apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from merakc.ir.graph import Graph, Node, Ref, map_refs
from merakc.passes.autodiff.interpret import run_node
from merakc.passes.sharding.dims import given, signature
from merakc.passes.sharding.experts.ends import ATTEMPTS, GROUPED, SORTS, between

SELECT, INDEX = "aten.index_select.default", "aten.index.Tensor"
ARGSORTS = {"aten.argsort.default": "aten.sort.default", "aten.argsort.stable": "aten.sort.stable"}


def with_sorted_forms(graph: Graph) -> Graph:
    """The graph in these forms; itself, where no rows are multiplied in groups."""
    if not any(node.op == GROUPED for node in graph.nodes):
        return graph
    graph = _with_sorts(_with_indices(graph))
    for sort in [n for n in graph.nodes if n.op in SORTS and len(n.outputs) == 2]:
        for ends in dict.fromkeys(n.args[2] for n in graph.nodes if n.op == GROUPED):
            graph = _counted_apart(graph, sort, ends)
    return graph.pruned()


def _with_indices(graph: Graph) -> Graph:
    nodes = (
        replace(n, op=INDEX, args=(n.args[0], (n.args[2],)))
        if n.op == SELECT and n.args[1] == 0 and len(graph.specs()[n.args[2]].shape) == 1
        else n
        for n in graph.nodes
    )
    return graph.with_nodes(list(nodes))


def _with_sorts(graph: Graph) -> Graph:
    """The order of a list as the second result of its sort, and the list in that order as the
    first; of equal sorts one.
    """
    specs, now = graph.specs(), dict[Ref, Ref]()
    orders: dict[Ref, Ref] = {}  # of the list
    known: dict[Any, str] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        own = node.reading(*map_refs((node.args, node.kwargs), lambda r: now.get(r, r)))
        if node.op in (*ARGSORTS, *ARGSORTS.values()) and len(node.spec.shape) == 1:
            stable = "stable" in signature(node.op) and bool(given(node, "stable"))
            differs = specs[node.args[0]].dtype.is_floating_point  # with gradients and without
            how = stable, bool(given(node, "descending")), differs and node.grad
            first = known.setdefault((own.args[0], *how), node.name)
            results = [Ref(first, 0), Ref(first, 1)]
            now.update(zip(node.outs, results[-len(node.outs) :], strict=True))
            if not how[1] and not differs:
                orders[own.args[0]] = results[1]
            if first == node.name:
                both = specs[node.args[0]], node.outputs[-1]
                nodes.append(replace(own, op=ARGSORTS.get(node.op, node.op), outputs=both))
            continue
        order = orders.get(own.args[0]) if own.op == INDEX else None
        if order is not None and own.args[1] == (order,):
            now[Ref(node.name)] = Ref(order.node)
            continue
        nodes.append(own)
    if not now:
        return graph
    outputs = tuple(o.at(now.get(o.ref, o.ref)) for o in graph.outputs)
    return replace(graph, nodes=tuple(nodes), outputs=outputs)


def _counted_apart(graph: Graph, sort: Node, ends: Ref) -> Graph:
    """The graph in which products in groups read ends that are counted from the sorted numbers, and
    all others what is counted from the unsorted ones, where both give the same.
    """
    roots = Ref(sort.name), sort.args[0]
    chain = between(graph, roots, ends)
    if not chain:
        return graph
    names = {node.name for node in chain}
    products = {n.name for n in graph.nodes if n.op == GROUPED and n.args[2] == ends}
    outside = [r for n in graph.nodes if n.name not in names | products for r in n.refs]
    read = {r for r in (*outside, *(o.ref for o in graph.outputs)) if r.node in names}
    is_sorted = all(sort.args[0] not in node.refs for node in chain)
    if (is_sorted and not read) or not _same(graph, chain, roots, [ends, *read]):
        return graph
    copies = {ref: Ref(f"{ref.node}.sorted", ref.index) for n in chain for ref in n.outs}
    of_sorted = _named(chain, copies | {roots[1]: roots[0]})
    of_given = {n.name: n for n in _named(chain, {roots[0]: roots[1]})}
    nodes: list[Node] = []
    first = next(n.name for n in graph.nodes if n.name in products)
    for node in graph.nodes:
        if node.name == first:
            nodes += of_sorted
        if node.name in products:
            nodes.append(node.reading((*node.args[:2], copies[ends], *node.args[3:])))
        else:
            nodes.append(of_given.get(node.name, node))
    return replace(graph, nodes=tuple(nodes)).pruned()


def _named(chain: Sequence[Node], now: Mapping[Ref, Ref]) -> list[Node]:
    """The nodes, with values that they read, and make, under other names."""

    def moved(ref: Ref) -> Ref:
        return now.get(ref, ref)

    return [
        replace(
            node, name=moved(Ref(node.name)).node,
            args=map_refs(node.args, moved), kwargs=map_refs(node.kwargs, moved),
        )
        for node in chain
    ]  # fmt: skip


def _same(graph: Graph, chain: Sequence[Node], roots: tuple[Ref, Ref], read: Sequence[Ref]) -> bool:
    """Whether what is read of a chain, the ends of groups first, is the same of numbers as of the
    sorted ones: computed, for numbers of groups at random.
    """
    spec, draw = graph.specs()[roots[0]], torch.Generator().manual_seed(0)
    groups = graph.specs()[read[0]].numel
    for least, most in [(0, groups)] * ATTEMPTS + [(-1, groups + 1)] * ATTEMPTS:
        drawn = torch.randint(least, most, spec.shape, generator=draw).to(spec.dtype)
        found: list[list[torch.Tensor]] = []
        for ids in (drawn, drawn.sort().values):
            values: dict[Ref, Any] = {Ref(n): c for n, c in graph.constants.items()}
            values |= dict.fromkeys(roots, ids)
            try:
                for node in chain:
                    run_node(graph, node, values)
            except (RuntimeError, IndexError, ValueError):
                if least < 0:  # the forward would fail, too
                    continue
                return False
            found.append([values[ref] for ref in read])
        if len(found) > 1 and not all(map(torch.equal, *found)):
            return False
    return True
