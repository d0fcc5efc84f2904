"""What comes nearest to a mixture in a graph in which none is found, with its line."""

from __future__ import annotations

from merakc.ir.graph import Graph, Ref
from merakc.passes.sharding.experts.ends import PLACES
from merakc.passes.sharding.experts.loops import sorted_loops


def nearest(graph: Graph) -> str:
    """The line that stands in the way of a part that only some rows reach; where there is none, the
    choice of places among trained scores that no rows are selected by; or nothing.
    """
    faults = sorted_loops(graph).faults
    if faults:
        return f"; the nearest is at {faults[0]}"
    users, grads = graph.users(), graph.grad_values()
    for node in graph.nodes:
        index = PLACES.get(node.op)
        if index is None or node.refs[0] not in grads:
            continue
        if any(Ref(node.name, index) in user.refs for user in users[node.name]):
            return (
                f"; the nearest is what {node.op} at {node.source} chooses, by which no rows are "
                "selected: where every expert computes every row there is nothing to send; select "
                "each expert's rows (rows = torch.where(chosen == k)[0]; out.index_add_(0, rows, "
                "expert(x[rows]) * weights[rows]))"
            )
    return ""
