"""Whether the groups of a product of rows end where the rows of each expert do."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain as chain_of
from typing import Any

import torch

from merakc.analysis.aliases import is_view
from merakc.ir.graph import Graph, Node, Ref, TensorSpec, map_refs
from merakc.passes.autodiff.interpret import run_node
from merakc.passes.sharding.dims import given

SORTS = ("aten.sort.default", "aten.sort.stable", "aten.argsort.default", "aten.argsort.stable")
# Which result of a call is the places of largest values in a dim, and what copies numbers.
PLACES = {
    "aten.topk.default": 1, "aten.sort.default": 1, "aten.sort.stable": 1, "aten.max.dim": 1,
    "aten.argsort.default": 0, "aten.argmax.default": 0, "aten.argmin.default": 0,
}  # fmt: skip
COPIES = ("aten.clone.default", "aten.contiguous.default", "aten.reshape.default",
          "aten.flatten.using_ints", "aten._to_copy.default", "aten.to.dtype")  # fmt: skip
DIVISIONS = ("aten.floor_divide.default", "aten.div.Tensor_mode")
GROUPED = "merakc.grouped_mm.default"
ATTEMPTS = (
    3  # draws of experts: a function that agrees on all of them by chance is none that is met
)


def ends_where_experts_do(graph: Graph, ids: Ref, ends: Ref) -> bool:
    """Whether the groups of a product end where the rows of each expert do, for any `ids` in order.

    Only then is a row multiplied with its own expert's matrix, whichever others there are; where a
    capacity cuts groups short, say, it is not, though a part may be too small to reach it. It is
    computed, for numbers of experts at random and all of one expert, and for numbers of none, as
    of rows that are dropped, unless they are the places of largest values.
    """
    makers, specs = {n.name: n for n in graph.nodes}, graph.specs()
    nodes = between(graph, {ids}, ends)
    if nodes is None:
        return False
    chain, known = (makers[ids.node], *nodes), graph.told(_known_chains)
    are_experts = _are_places(makers, specs, chain[0].refs[0], specs[ends].shape[0])
    form = _form(chain, ids, ends), str(specs[chain[0].refs[0]]), str(specs[ends]), are_experts
    if form not in known:  # layers are alike
        known[form] = _ends_of_drawn(graph, chain, ids, ends, are_experts=are_experts)
    return known[form]


def _known_chains(_: Graph) -> dict[tuple[Any, ...], bool]:
    return {}


def _are_places(
    makers: Mapping[str, Node], specs: Mapping[Ref, TensorSpec], ref: Ref, experts: int
) -> bool:
    """Whether numbers are places of as many values as there are experts, and so none is another."""
    while ref.node in makers and (is_view(makers[ref.node]) or makers[ref.node].op in COPIES):
        if specs[ref].dtype not in (torch.int32, torch.int64):  # which may not hold them
            return False
        ref = makers[ref.node].refs[0]
    maker = makers.get(ref.node)
    if maker is None or PLACES.get(maker.op) != ref.index:
        return False
    dim = given(maker, "dim")
    shape = specs[maker.refs[0]].shape
    return shape[-1 if dim is None else dim] == experts and not (
        dim is None and maker.op in ("aten.argmax.default", "aten.argmin.default")
    )


def _form(chain: Sequence[Node], ids: Ref, ends: Ref) -> str:
    """What a chain computes of the first node's argument and of constants, whatever its names."""
    numbers = {chain[0].refs[0]: "given"}
    numbers |= {ref: f"{k}.{ref.index}" for k, node in enumerate(chain) for ref in node.outs}

    def own(ref: Ref) -> str:
        return numbers.get(ref, f"constant {ref.node}")

    each = ((n.op, map_refs(n.args, own), map_refs(n.kwargs, own), n.outputs) for n in chain)
    return repr((*each, own(ids), own(ends)))


def _ends_of_drawn(
    graph: Graph, chain: Sequence[Node], ids: Ref, ends: Ref, *, are_experts: bool
) -> bool:
    specs, given = graph.specs(), chain[0].refs[0]
    groups, spec, draw = specs[ends].shape[0], specs[ids], torch.Generator().manual_seed(0)
    read = {ref for node in chain for ref in node.refs if ref.node in graph.constants}
    # One after the other: there may be a row for each of many million tokens.
    drawn = (torch.randint(groups, spec.shape, generator=draw) for _ in range(ATTEMPTS))
    alike = (torch.full(spec.shape, k) for k in (0, groups - 1))
    count = 0 if are_experts else ATTEMPTS
    others = (torch.randint(-1, groups + 1, spec.shape, generator=draw) for _ in range(count))
    for experts in chain_of(drawn, alike, others):
        values = {ref: graph.constants[ref.node] for ref in read}
        values[given] = experts.to(spec.dtype)
        try:
            for node in chain:
                run_node(graph, node, values)
        except (RuntimeError, IndexError, ValueError):
            if bool(((experts < 0) | (experts >= groups)).any()):
                continue  # the forward would fail, too
            return False
        rows = values[ids].contiguous()
        if not torch.equal(rows, rows.sort().values):  # the last expert's rows come first
            return False
        wanted = torch.searchsorted(rows, torch.arange(groups), right=True)
        if not torch.equal(values[ends].long(), wanted):
            return False
    return True


def between(graph: Graph, roots: Collection[Ref], last: Ref) -> list[Node] | None:
    """The nodes that make `last` of the roots and constants; None where it follows from more."""
    places = graph.told(_places)
    needed: set[int] = set()
    waiting = [last]
    while waiting:
        ref = waiting.pop()
        if ref in roots or ref.node in graph.constants:
            continue
        place = places.get(ref.node)
        if place is None:
            return None
        if place not in needed:
            needed.add(place)
            waiting += graph.nodes[place].refs
    return [graph.nodes[place] for place in sorted(needed)]


def _places(graph: Graph) -> dict[str, int]:
    return {node.name: place for place, node in enumerate(graph.nodes)}
