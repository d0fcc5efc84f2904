"""What the backward of a compiled stage computes again, so that less is kept.

Where runs of calls become kernels, a pointwise call that the backward repeats costs next to
nothing: it joins a kernel that reads what it reads. The forward keeps the fewest bytes from which
the rest comes by pointwise calls and views alone. The choice is a minimum cut, as in the
partitioner of `torch.compile`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from merakc.ir.graph import Graph, Input, InputKind, Output, OutputKind, Ref
from merakc.ir.program import Chunk
from merakc.kernels.ops import is_pointwise
from merakc.passes.recompute import Cut, is_view, sorted_refs

# What a byte that is made again costs beside one that is kept.
AGAIN = 0.05


def rematerialised(chunk: Chunk) -> Chunk:
    """The chunk with a forward that keeps less, and a backward that makes the rest again.

    Its other pieces are to be made from the chunk that this gives.
    """
    if chunk.backward is None:
        return chunk
    whole, specs = chunk.forward, chunk.forward.specs()
    kept = {r: f"saved:{r}" for r in sorted_refs(_kept(chunk))}
    saved = [o for o in whole.outputs if o.kind is OutputKind.SAVED]
    given = tuple(Input(n, InputKind.SAVED, specs[r], str(r)) for r, n in kept.items())
    again = replace(whole, outputs=tuple(saved)).renamed({r: Ref(n) for r, n in kept.items()})
    again = again.pruned()
    made = {o.name: o.ref for o in again.outputs}
    read = (i for i in chunk.backward.inputs if i.kind is InputKind.SAVED)
    rest = chunk.backward.renamed({Ref(i.name): made[i.target] for i in read})
    others = (i for i in rest.inputs if i.kind is not InputKind.SAVED)
    inputs = dict.fromkeys((*others, *again.inputs, *given))
    constants = {**again.constants, **rest.constants}
    nodes = (*again.nodes, *rest.nodes)
    backward = Graph(tuple(inputs), nodes, rest.outputs, constants, rest.functions)
    backward = backward.without_unread_inputs()
    wanted = {i.target for i in backward.inputs if i.kind is InputKind.SAVED}
    results = (o for o in whole.outputs if o.kind is not OutputKind.SAVED)
    outputs = (*results, *(Output(str(r), OutputKind.SAVED, r) for r in kept if str(r) in wanted))
    return replace(chunk, forward=replace(whole, outputs=outputs).pruned(), backward=backward)


def _kept(chunk: Chunk) -> frozenset[Ref]:
    cut = Cut(chunk, _costs(chunk.forward))
    return cut.kept(cut.total_bytes / (cut.total_bytes + cut.total_s))


def _costs(graph: Graph) -> dict[str, float]:
    """Of running each node again, in bytes that are kept.

    What reads a value that has waited behind a call of another kind is not run again: the terms of
    a residual stream are far apart, and to add them up anew all of it would be in memory at once.
    """
    roots: dict[Ref, Ref] = {}  # what a view looks at
    costs: dict[str, float] = {}
    waited: set[Ref] = set()  # values that a call of another kind has read
    for node in graph.nodes:
        read = {roots.get(r, r) for r in node.refs}
        made = sum(spec.size_bytes for spec in node.outputs if spec is not None)
        if is_view(node):
            root = roots.get(node.refs[0], node.refs[0])
            roots |= {Ref(node.name, k): root for k in range(len(node.outputs))}
            costs[node.name] = 0.0
        elif is_pointwise(node.op):
            costs[node.name] = np.inf if read & waited else AGAIN * made
        else:
            waited |= read
            costs[node.name] = np.inf
    return costs
