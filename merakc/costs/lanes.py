"""The collectives inside the graphs of a stage, and when in their graph they run."""

from __future__ import annotations

from merakc.costs.roofline import link_seconds, node_seconds, pipelined
from merakc.costs.work.flops import COLLECTIVES, PIPELINED, wire_bytes
from merakc.ir.costs import GraphCollective, GraphCollectives
from merakc.ir.graph import Graph, Node
from merakc.ir.program import ActionKind, StageGraphs
from merakc.kernels.ops import STARTED, WAIT
from merakc.machines.cluster import Cluster


def graph_collectives(graph: Graph, cluster: Cluster) -> tuple[GraphCollective, ...]:
    """Those of a graph, in the order in which they are issued, with `graph_seconds`' times."""
    if not any(n.op in COLLECTIVES or n.op in STARTED or n.op in PIPELINED for n in graph.nodes):
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
        if node.op in PIPELINED:
            start_s = max(now_s, free_s)
            own = pipelined(node, specs, cluster)
            now_s = free_s = start_s + own.seconds
            # What is not hidden: before the first product, or behind the last.
            if node.op == "merakc.matmul_scatter.default":
                spans = [now_s - own.wire_s, now_s, now_s - own.exposed_s, now_s]
            else:
                spans = [start_s, start_s + own.wire_s, start_s, start_s + own.exposed_s]
            times_s[node.name] = node, spans
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
            _name(node), _axis(node), wire_bytes(node, specs), *(s / now_s for s in own_s)
        )
        for node, own_s in times_s.values()
    )


def chunk_collectives(stage: int, chunk: StageGraphs, cluster: Cluster) -> GraphCollectives:
    """Those of a stage's graphs, by what runs them."""
    graphs = {(kind, False): chunk.piece(kind) for kind in ActionKind if kind.is_compute} | {
        (ActionKind.FORWARD, True): chunk.checkpoint
    }
    return {
        (stage, *of): graph_collectives(graph, cluster) for of, graph in graphs.items() if graph
    }


def _name(node: Node) -> str:
    """What the runtime calls it."""
    op = PIPELINED.get(node.op) or STARTED.get(node.op, node.op)
    name = op.split(".")[1]
    return "all_gather" if name == "gather_to" else name


def _axis(node: Node) -> str:
    """The mesh axis that it runs over: the first name among its arguments."""
    return next(arg for arg in node.args if isinstance(arg, str))
