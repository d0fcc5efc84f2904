"""Seconds of nodes and graphs on a cluster's device, by the roofline model.

A node takes the longer of its arithmetic and its memory traffic (Williams, Waterman and Patterson,
"Roofline", CACM 52(4), 2009), plus the fixed time that any op takes.
"""

from __future__ import annotations

from collections.abc import Mapping

from merakc.cluster import Cluster
from merakc.costs.flops import COLLECTIVES, FREE, node_bytes, node_flops
from merakc.ir.graph import Graph, Node, Ref, TensorSpec

# How often a collective moves its tensor over a rank's link. A ring all-reduce is a reduce-scatter
# and an all-gather (Patarasuk and Yuan, JPDC 69(2), 2009), each (n - 1) / n times on n ranks.
WIRE = {op: 2 if "all_reduce" in op else 1 for op in COLLECTIVES}


def node_seconds(node: Node, specs: Mapping[Ref, TensorSpec], cluster: Cluster) -> float:
    """Seconds of one node."""
    if node.op in COLLECTIVES:
        sizes = [specs[r].size_bytes for r in node.refs]
        sizes += [o.size_bytes for o in node.outputs if o is not None]
        wire_bytes = WIRE[node.op] * max(sizes)
        return cluster.link_latency_s + wire_bytes / cluster.link_bytes_per_s
    if node.op in FREE:
        return cluster.op_overhead_s
    arithmetic = node_flops(node, specs) / cluster.flops_per_s
    return max(arithmetic, node_bytes(node, specs) / cluster.bytes_per_s) + cluster.op_overhead_s


def graph_seconds(graph: Graph, cluster: Cluster) -> float:
    """Seconds of all nodes, one after the other."""
    specs = graph.specs()
    return sum(node_seconds(n, specs, cluster) for n in graph.nodes)
