"""Seconds of nodes and graphs on a cluster's device, by the roofline model.

A node takes the longer of its arithmetic and its memory traffic (Williams, Waterman and Patterson,
"Roofline", CACM 52(4), 2009), plus the fixed time that any op takes.
"""

from __future__ import annotations

from collections.abc import Mapping

from merakc.cluster import Cluster
from merakc.costs.flops import COLLECTIVES, FREE, node_bytes, node_flops
from merakc.ir.graph import Graph, Node, Ref, TensorSpec
from merakc.kernels.ops import STARTED, WAIT

# How often a collective moves its tensor over a rank's link. A ring all-reduce is a reduce-scatter
# and an all-gather (Patarasuk and Yuan, JPDC 69(2), 2009), each (n - 1) / n times on n ranks.
WIRE = {op: 2 if "all_reduce" in op else 1 for op in COLLECTIVES}


def node_seconds(node: Node, specs: Mapping[Ref, TensorSpec], cluster: Cluster) -> float:
    """Seconds of one node; of one that starts a collective, or waits for one, what it computes."""
    if node.op in COLLECTIVES:
        return link_seconds(node, specs, cluster)
    if node.op in FREE or node.op in STARTED:
        return cluster.op_overhead_s
    arithmetic = node_flops(node, specs) / cluster.flops_per_s
    return max(arithmetic, node_bytes(node, specs) / cluster.bytes_per_s) + cluster.op_overhead_s


def link_seconds(node: Node, specs: Mapping[Ref, TensorSpec], cluster: Cluster) -> float:
    """Seconds of a collective, or of one that a node starts, on the link; of other nodes 0."""
    op = STARTED.get(node.op, node.op)
    if op not in COLLECTIVES:
        return 0.0
    sizes = [specs[r].size_bytes for r in node.refs]
    sizes += [o.size_bytes for o in node.outputs if o is not None]
    return cluster.link_latency_s + WIRE[op] * max(sizes) / cluster.link_bytes_per_s


def graph_seconds(graph: Graph, cluster: Cluster) -> float:
    """Seconds of all nodes in their order.

    Collectives that are only started run beside, one after the other, and a wait lasts until its
    own has ended.
    """
    specs = graph.specs()
    now_s = free_s = 0.0
    ends_s: dict[str, float] = {}
    for node in graph.nodes:
        if node.op in COLLECTIVES:
            now_s = free_s = max(now_s, free_s) + link_seconds(node, specs, cluster)
            continue
        if node.op == WAIT:
            now_s = max(now_s, ends_s[node.refs[0].node])
        now_s += node_seconds(node, specs, cluster)
        if node.op in STARTED:
            free_s = max(now_s, free_s) + link_seconds(node, specs, cluster)
            ends_s[node.name] = free_s
    return now_s
