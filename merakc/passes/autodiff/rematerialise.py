"""What a backward computes again because it costs next to nothing, so that less is kept.

The forward keeps the fewest bytes from which the rest comes by pointwise calls and views alone. The
choice is a minimum cut, as in the partitioner of `torch.compile`. Where runs of calls become
kernels, a call that the backward repeats joins a kernel that reads what it reads. Where they run
one by one, it runs right before what reads it, and small values are not worth it.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import replace
from math import inf

from merakc.analysis.aliases import is_view, view_roots
from merakc.costs.work.pieces import AGAIN, LEAST_BYTES
from merakc.ir.graph import Graph, Input, InputKind, Output, OutputKind, Ref
from merakc.ir.program import StageGraphs
from merakc.kernels.ops import is_pointwise
from merakc.passes.autodiff.recompute import Cut, sorted_refs

# What a byte that is made again in a kernel costs beside one that is kept; by a call, `AGAIN`.
AGAIN_IN_KERNELS = 0.05


def rematerialised(stage: StageGraphs) -> StageGraphs:
    """The stage of a compiled stage with a forward that keeps less, and a backward that makes the
    rest again.

    Its other pieces are to be made from the stage that this gives.
    """
    if stage.backward is None:
        return stage
    return _keeping(stage, _kept(stage, _costs(stage.forward, AGAIN_IN_KERNELS)))


def lean(stage: StageGraphs) -> StageGraphs:
    """The same of a stage whose calls run one by one, and make again what is read next."""
    if stage.backward is None:
        return stage
    forward, specs = stage.forward, stage.forward.specs()
    if all(spec.size_bytes <= LEAST_BYTES for spec in specs.values()):
        return stage
    kept = _kept(stage, _costs(forward, AGAIN, (1 - AGAIN) * LEAST_BYTES))
    made = _keeping(stage, _with_views(forward, kept))
    assert made.backward is not None
    return replace(made, backward=late(made.backward))


def _with_views(forward: Graph, kept: Collection[Ref]) -> set[Ref]:
    """What a backward reads of the memory of kept values, and what the rest is made of."""
    roots, makers = view_roots(forward), {n.name: n for n in forward.nodes}
    wanted = [o.ref for o in forward.outputs if o.kind is OutputKind.SAVED]
    found: set[Ref] = set()
    seen = set(wanted)
    while wanted:
        ref = wanted.pop()
        if roots.get(ref, ref) in kept:
            found.add(ref)
        elif ref.node in makers:
            new = set(makers[ref.node].refs) - seen
            seen |= new
            wanted += new
    return found


def late(graph: Graph) -> Graph:
    """The graph of a backward with what follows by pointwise calls and views from what it has
    before any gradient comes right before what reads it; another graph as it is.
    """
    if not any(i.kind is InputKind.SAVED for i in graph.inputs):
        return graph
    place = {node.name: k for k, node in enumerate(graph.nodes)}
    free = {i.name for i in graph.inputs if i.kind is not InputKind.TANGENT}
    for node in graph.nodes:
        if (is_view(node) or is_pointwise(node.op)) and all(r.node in free for r in node.refs):
            free.add(node.name)
    readers = graph.users()
    for node in reversed(graph.nodes):
        if node.name in free and readers[node.name]:
            place[node.name] = min(place[reader.name] for reader in readers[node.name])
    nodes = sorted(graph.nodes, key=lambda node: (place[node.name], node.name not in free))
    return replace(graph, nodes=tuple(nodes))


def _keeping(stage: StageGraphs, keep: Collection[Ref]) -> StageGraphs:
    assert stage.backward is not None
    whole, specs = stage.forward, stage.forward.specs()
    # Interned: one string in all graphs of a model.
    names = {r: sys.intern(str(r)) for r in sorted_refs(keep)}
    kept = {r: sys.intern(f"saved:{r}") for r in names}
    saved = [o for o in whole.outputs if o.kind is OutputKind.SAVED]
    given = tuple(Input(n, InputKind.SAVED, specs[r], names[r]) for r, n in kept.items())
    again = replace(whole, outputs=tuple(saved)).renamed({r: Ref(n) for r, n in kept.items()})
    again = again.pruned()
    made = {o.name: o.ref for o in again.outputs}
    read = (i for i in stage.backward.inputs if i.kind is InputKind.SAVED)
    rest = stage.backward.renamed({Ref(i.name): made[i.target] for i in read})
    others = (i for i in rest.inputs if i.kind is not InputKind.SAVED)
    inputs = dict.fromkeys((*others, *again.inputs, *given))
    constants = {**again.constants, **rest.constants}
    nodes = (*again.nodes, *rest.nodes)
    backward = Graph(tuple(inputs), nodes, rest.outputs, constants, rest.functions)
    backward = backward.without_unread_inputs()
    wanted = {i.target for i in backward.inputs if i.kind is InputKind.SAVED}
    results = (o for o in whole.outputs if o.kind is not OutputKind.SAVED)
    outputs = (*results, *(Output(n, OutputKind.SAVED, r) for r, n in names.items() if n in wanted))
    return replace(stage, forward=replace(whole, outputs=outputs).pruned(), backward=backward)


def _kept(stage: StageGraphs, costs: Mapping[str, float]) -> frozenset[Ref]:
    cut = Cut(stage, costs)
    return cut.kept(cut.total_bytes / (cut.total_bytes + cut.total_s))


def _costs(graph: Graph, again: float, call_bytes: float = 0.0) -> dict[str, float]:
    """Of running each node again, in bytes that are kept; what serves the backward alone runs there
    at no cost.

    What reads a value that has waited behind a call of another kind is not run again: the terms of
    a residual stream are far apart, and to add them up anew all of it would be in memory at once.
    """
    roots = view_roots(graph)
    results = tuple(o for o in graph.outputs if o.kind is not OutputKind.SAVED)
    needed = {n.name for n in replace(graph, outputs=results).pruned().nodes}
    costs: dict[str, float] = {}
    waited: set[Ref] = set()  # values that a call of another kind has read
    for node in graph.nodes:
        read = {roots.get(r, r) for r in node.refs}
        made = sum(spec.size_bytes for spec in node.outputs if spec is not None)
        if is_view(node):
            costs[node.name] = 0.0
        elif is_pointwise(node.op):
            cost = again * made + call_bytes if node.name in needed else 0.0
            costs[node.name] = inf if read & waited else cost
        else:
            waited |= read
            costs[node.name] = inf
    return costs
