"""In whose memory the values of a graph live."""

from __future__ import annotations

from collections import Counter

from merakc.ir.graph import Graph, Ref
from merakc.kernels.ops import returns_view


def owned_outputs(graph: Graph) -> frozenset[str]:
    """The outputs in memory of their own: made by a call that returns no view, and no other output
    is the same value or a view of it.
    """
    memory = {Ref(i.name): {Ref(i.name)} for i in graph.inputs}
    made: set[Ref] = set()
    for node in graph.nodes:
        own = {Ref(node.name, k) for k in range(len(node.outputs))}
        if returns_view(node.op):
            shared = set().union(*(memory[r] for r in node.refs))
            memory |= dict.fromkeys(own, shared)
        else:
            memory |= {ref: {ref} for ref in own}
            made |= own
    times = Counter(ref for o in graph.outputs for ref in memory[o.ref])
    return frozenset(o.name for o in graph.outputs if o.ref in made and times[o.ref] == 1)
