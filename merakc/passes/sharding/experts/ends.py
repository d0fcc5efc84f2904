"""Whether the groups of a product of rows end where the rows of each expert do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from merakc.ir.graph import Graph, Node, Ref, map_refs
from merakc.passes.autodiff.interpret import run_node

SORTS = ("aten.sort.default", "aten.sort.stable", "aten.argsort.default", "aten.argsort.stable")
DIVISIONS = ("aten.floor_divide.default", "aten.div.Tensor_mode")
GROUPED = "merakc.grouped_mm.default"
ATTEMPTS = (
    3  # draws of experts: a function that agrees on all of them by chance is none that is met
)


def ends_where_experts_do(graph: Graph, ids: Ref, ends: Ref) -> bool:
    """Whether the groups of a product end where the rows of each expert do, for any `ids` in order.

    Only then is a row multiplied with its own expert's matrix, whichever others there are; where a
    capacity cuts groups short, say, it is not, though a part may be too small to reach it. It is
    computed, for numbers of experts at random and all of one expert.
    """
    makers, specs = {n.name: n for n in graph.nodes}, graph.specs()
    nodes = _between(graph, makers, ids, ends)
    if nodes is None:
        return False
    chain, known = (makers[ids.node], *nodes), graph.told(_known_chains)
    form = _form(chain, ids, ends), str(specs[chain[0].refs[0]]), str(specs[ends])
    if form not in known:  # layers are alike
        known[form] = _ends_of_drawn(graph, chain, ids, ends)
    return known[form]


def _known_chains(_: Graph) -> dict[tuple[str, ...], bool]:
    return {}


def _form(chain: Sequence[Node], ids: Ref, ends: Ref) -> str:
    """What a chain computes of the first node's argument and of constants, whatever its names."""
    numbers = {chain[0].refs[0]: "given"}
    numbers |= {ref: f"{k}.{ref.index}" for k, node in enumerate(chain) for ref in node.outs}

    def own(ref: Ref) -> str:
        return numbers.get(ref, f"constant {ref.node}")

    each = ((n.op, map_refs(n.args, own), map_refs(n.kwargs, own), n.outputs) for n in chain)
    return repr((*each, own(ids), own(ends)))


def _ends_of_drawn(graph: Graph, chain: Sequence[Node], ids: Ref, ends: Ref) -> bool:
    specs, given = graph.specs(), chain[0].refs[0]
    groups, spec, draw = specs[ends].shape[0], specs[ids], torch.Generator().manual_seed(0)
    read = {ref for node in chain for ref in node.refs if ref.node in graph.constants}
    drawn = [torch.randint(groups, spec.shape, generator=draw) for _ in range(ATTEMPTS)]
    for experts in (*drawn, *(torch.full(spec.shape, k) for k in (0, groups - 1))):
        values = {ref: graph.constants[ref.node] for ref in read}
        values[given] = experts.to(spec.dtype)
        try:
            for node in chain:
                run_node(graph, node, values)
        except (RuntimeError, IndexError, ValueError):
            return False
        rows = values[ids].contiguous()
        if not torch.equal(rows, rows.sort().values):  # the last expert's rows come first
            return False
        wanted = torch.searchsorted(rows, torch.arange(groups), right=True)
        if not torch.equal(values[ends].long(), wanted):
            return False
    return True


def _between(graph: Graph, makers: Mapping[str, Node], first: Ref, last: Ref) -> list[Node] | None:
    """The nodes that make `last` of `first` and constants; None where it follows from more."""
    needed: set[str] = set()
    waiting = [last]
    while waiting:
        ref = waiting.pop()
        maker = makers.get(ref.node)
        if ref == first or ref.node in graph.constants:
            continue
        if maker is None:
            return None
        if maker.name not in needed:
            needed.add(maker.name)
            waiting += maker.refs
    return [n for n in graph.nodes if n.name in needed]
