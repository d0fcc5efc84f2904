"""The collectives inside the graphs of a stage, and when in their graph they run."""

from __future__ import annotations

from merakc.cluster import Cluster
from merakc.costs.flops import COLLECTIVES
from merakc.costs.roofline import link_seconds, node_seconds
from merakc.ir.costs import GraphCollective, GraphCollectives
from merakc.ir.graph import Graph, Node, Ref, TensorSpec
from merakc.ir.program import ActionKind, Chunk
from merakc.kernels.ops import STARTED, WAIT


def graph_collectives(graph: Graph, cluster: Cluster) -> tuple[GraphCollective, ...]:
    """Those of a graph, in the order in which they are issued, with `graph_seconds`' times."""
    if not any(n.op in COLLECTIVES or n.op in STARTED for n in graph.nodes):
        return ()
    specs = graph.specs()
    now_s = free_s = 0.0
    times_s: dict[str, tuple[Node, list[float]]] = {}  # start, end, start and end of the wait
    for node in graph.nodes:
        if node.op in COLLECTIVES:
            start_s = now_s
            now_s = free_s = max(now_s, free_s) + link_seconds(node, specs, cluster)
            times_s[node.name] = node, [start_s, now_s, start_s, now_s]
            continue
        if node.op == WAIT:
            own_s = times_s[node.refs[0].node][1]
            own_s[2:] = now_s, max(now_s, own_s[1])
            now_s = own_s[3]
        now_s += node_seconds(node, specs, cluster)
        if node.op in STARTED:
            free_s = max(now_s, free_s) + link_seconds(node, specs, cluster)
            times_s[node.name] = node, [now_s, free_s, free_s, free_s]
    return tuple(
        GraphCollective(
            _name(node), str(node.args[1]), _size_bytes(node, specs), *(s / now_s for s in own_s)
        )
        for node, own_s in times_s.values()
    )


def chunk_collectives(stage: int, chunk: Chunk, cluster: Cluster) -> GraphCollectives:
    """Those of a stage's graphs, by what runs them."""
    graphs = {(kind, False): chunk.piece(kind) for kind in ActionKind if kind.is_compute} | {
        (ActionKind.FORWARD, True): chunk.checkpoint
    }
    return {
        (stage, *of): graph_collectives(graph, cluster) for of, graph in graphs.items() if graph
    }


def _name(node: Node) -> str:
    """What the runtime calls it."""
    op = STARTED.get(node.op, node.op).split(".")[1]
    return "all_gather" if op == "gather_to" else op


def _size_bytes(node: Node, specs: dict[Ref, TensorSpec]) -> int:
    """The bytes of its tensor, whole."""
    sizes = [specs[r].size_bytes for r in node.refs]
    return max([*sizes, *(o.size_bytes for o in node.outputs if o is not None)])
