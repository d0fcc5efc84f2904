"""Rows taken from, or put into, places that the batch says, each in its own sample.

`x[index]` with an index of the batch alone crosses no sample where each place is among those of the
sample that the row is to be of. That depends on the batch, not on shapes: it is checked before
every step, on the index of the whole batch. A part then reads the places within its samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from merakc.ir.graph import Graph, Node, Ref, map_refs
from merakc.passes.batches.aligned import KNOWN, WITHIN
from merakc.passes.batches.own_rules import Place
from merakc.passes.batches.states import SAMPLES, Dim, Kind, Outcome, State
from merakc.passes.sharding.dims import given

INDEX, PUT = "aten.index.Tensor", "aten.index_put.default"
LOCAL = "merakc.local.default"


class Picked(NamedTuple):
    """An index of places in samples that have `each`, of which every sample has `rows`."""

    ref: Ref
    each: int
    rows: int


def placed_rule(place: Place) -> Outcome | None:
    """The outcome of a selection, or a write, by known places; None for all others."""
    node = place.node
    if node.op not in (INDEX, PUT):
        return None
    x = place.states[node.args[0]]
    picks = [(k, r) for k, r in enumerate(node.args[1]) if r is not None]
    if x.kind is not Kind.ROWS or x.dims is None or x.rows is None or x.routed:
        return None
    first, none = place.states[picks[0][1]].dims, ((0,),)
    if node.op == PUT and all(place.states[r].dims == none for _, r in picks):
        return Outcome((State(Kind.ROWS, x.dims),))  # into no place at all
    own = [(k, r) for k, r in picks if SAMPLES in x.dims[k]]
    if len(own) != 1 or not first or len(first) != 1 or first[0][:1] != (SAMPLES,):
        return None
    if not all(_is_places(place, r, first) for _, r in picks) or x.dims[own[0][0]][0] != SAMPLES:
        return None
    dims = list(x.dims)
    for k, _ in reversed(picks):
        del dims[k]
    at = [k for k, _ in picks]
    dims.insert(at[0] if at == list(range(at[0], at[-1] + 1)) else 0, first[0])
    if node.op == PUT and not _fits(place, tuple(dims)):
        return None
    found = tuple(dims) if node.op == INDEX else x.dims
    picked = Picked(own[0][1], _inner(x.dims[own[0][0]]), _inner(first[0]))
    return Outcome((State(Kind.ROWS, found),), picked=picked)


def _is_places(place: Place, ref: Ref, dims: tuple[Dim, ...]) -> bool:
    """Whether a value holds places that the batch alone says, some of each sample."""
    state, spec = place.states[ref], place.part.specs()[ref]
    whole = not spec.dtype.is_floating_point and spec.dtype.itemsize > 1
    return whole and state.known and state.kind is Kind.ROWS and state.dims == dims


def _fits(place: Place, dims: tuple[Dim, ...]) -> bool:
    """Whether what is put into the places is each sample's own, or the same for all."""
    values = place.states[given(place.node, "values")]
    if values.kind not in (Kind.ROWS, Kind.CONSTANT) or values.dims is None or values.routed:
        return False
    one = math.prod(place.shape(given(place.node, "values"))) == 1
    return values.dims == dims or (one and not values.sampled)


def _inner(dim: Dim) -> int:
    return math.prod(int(f) for f in dim[1:])


def with_places(graph: Graph, picked: Mapping[str, Picked], *, whole: bool) -> Graph:
    """The graph with the nodes of these names reading places within their samples; `whole` says
    that it is the whole batch's, in which they are worked out and checked.
    """
    if not picked:
        return graph
    specs, nodes = graph.specs(), []
    for node in graph.nodes:
        if node.name not in picked:
            nodes.append(node)
            continue
        ref, each, rows = picked[node.name]
        about = each, rows, node.source
        spec, where = specs[ref], (node.module, node.source, False)
        rel, own = f"{node.name}.within", f"{node.name}.places"
        op, args = (WITHIN, (ref, *about)) if whole else (KNOWN, ())
        nodes.append(Node(rel, op, args, (), (spec,), *where))
        nodes.append(Node(own, LOCAL, (Ref(rel), *about), (), (spec,), *where))
        indices = _renamed(node.args[1], ref, Ref(own))
        nodes.append(replace(node, args=(node.args[0], indices, *node.args[2:])))
    return replace(graph, nodes=tuple(nodes))


def _renamed(indices: Sequence[Ref | None], ref: Ref, now: Ref) -> tuple[Ref | None, ...]:
    found: tuple[Ref | None, ...] = map_refs(tuple(indices), lambda r: now if r == ref else r)
    return found


def place_states(graph: Graph, picked: Mapping[str, Picked]) -> dict[Ref, State]:
    """The states of the places within samples, and of a part's own, which no parts join to."""
    specs, found = graph.specs(), {}
    for name, (ref, _, rows) in picked.items():
        dims: tuple[Dim, ...] = ((SAMPLES,) if rows == 1 else (SAMPLES, rows),)
        assert len(specs[ref].shape) == 1
        within = State(Kind.ROWS, dims, known=True, whole=True)
        found[Ref(f"{name}.within")] = within
        found[Ref(f"{name}.places")] = State(Kind.ROWS, dims, routed=("places", name))
    return found
