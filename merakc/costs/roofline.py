"""Seconds of nodes and graphs on a cluster's device, by the roofline model.

A node takes the longer of its arithmetic and its memory traffic (Williams, Waterman and Patterson,
"Roofline", CACM 52(4), 2009), plus the fixed time that any op takes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from merakc.analysis.aliases import FREE
from merakc.costs.work.flops import COLLECTIVES, PIPELINED, node_bytes, node_flops, wire_bytes
from merakc.ir.graph import Graph, Node, Ref, TensorSpec
from merakc.kernels.ops import STARTED, WAIT
from merakc.machines.cluster import Cluster

# How often a collective moves its tensor over a rank's link. A ring all-reduce is a reduce-scatter
# and an all-gather (Patarasuk and Yuan, JPDC 69(2), 2009), each (n - 1) / n times on n ranks.
WIRE = {op: 2 if "all_reduce" in op else 1 for op in COLLECTIVES}


def node_seconds(node: Node, specs: Mapping[Ref, TensorSpec], cluster: Cluster) -> float:
    """Seconds of one node; of one that starts a collective, or waits for one, what it computes."""
    if node.op in COLLECTIVES:
        return link_seconds(node, specs, cluster)
    if node.op in FREE or node.op in STARTED:
        return cluster.op_overhead_s
    if node.op in PIPELINED:
        return pipelined(node, specs, cluster).seconds
    return computing_seconds(node, specs, cluster) + cluster.op_overhead_s


def computing_seconds(
    node: Node, specs: Mapping[Ref, TensorSpec], cluster: Cluster, again_bytes: int = 0
) -> float:
    """Seconds of a node's arithmetic and traffic, with so many bytes moved once more."""
    moved_bytes = node_bytes(node, specs) + again_bytes
    return max(node_flops(node, specs) / cluster.flops_per_s, moved_bytes / cluster.bytes_per_s)


@dataclass(frozen=True, slots=True)
class Pipelined:
    """Seconds of products and the collective beside them in one node.

    `seconds` are all, of which the device waits `exposed_s` for the link; `hidden_s` of the link
    are under the products.
    """

    seconds: float
    exposed_s: float
    hidden_s: float

    @property
    def wire_s(self) -> float:
        """Those of the collective."""
        return self.exposed_s + self.hidden_s


def pipelined(node: Node, specs: Mapping[Ref, TensorSpec], cluster: Cluster) -> Pipelined:
    """What a node of `PIPELINED` takes: one after the other, or pipelined in symmetric memory.

    There it goes rank by rank: products of one part of the rows while the next is copied. The
    longer of the two hides the shorter, but for its first part. Every part is a call and a step of
    the link of its own, and reads the weights; where the parts are none of consecutive rows, torch
    puts them in order first.
    """
    rate = cluster.link_bytes_per_s * cluster.gather_share
    wire_s = cluster.link_latency_s + wire_bytes(node, specs) / rate
    if not cluster.symmetric_memory:
        product_s = computing_seconds(node, specs, cluster) + cluster.op_overhead_s
        return Pipelined(product_s + wire_s, wire_s, 0.0)
    *_, dim, sizes, _ = node.args
    parts = len(sizes)
    x, *weights = dict.fromkeys(node.refs)
    again_bytes = (parts - 1) * sum(specs[w].size_bytes for w in weights)
    product_s = computing_seconds(node, specs, cluster, again_bytes)
    product_s += parts * cluster.op_overhead_s
    if math.prod(specs[x].shape[:dim]) > 1:
        ordered = (specs[x], *(o for o in node.outputs if o is not None))
        product_s += 2 * sum(o.size_bytes for o in ordered) / cluster.bytes_per_s
    wire_s += (parts - 1) * cluster.link_latency_s
    seconds = max(product_s, wire_s) + min(product_s, wire_s) / parts
    exposed_s = seconds - product_s
    return Pipelined(seconds, exposed_s, wire_s - exposed_s)


def link_seconds(node: Node, specs: Mapping[Ref, TensorSpec], cluster: Cluster) -> float:
    """Seconds of a collective, or of one that a node starts, on the link; of other nodes 0."""
    op = STARTED.get(node.op, node.op)
    if op not in COLLECTIVES:
        return 0.0
    share = 1.0 if "all_reduce" in op else cluster.gather_share
    rate = cluster.link_bytes_per_s * share
    return cluster.link_latency_s + WIRE[op] * wire_bytes(node, specs) / rate


def graph_seconds(graph: Graph, cluster: Cluster) -> float:
    """Seconds of all nodes in their order.

    Collectives that are only started run beside, one after the other, and a wait lasts until its
    own has ended. A collective in one node with products waits for the link, as one that blocks.
    """
    specs = graph.specs()
    now_s = free_s = 0.0
    ends_s: dict[str, float] = {}
    for node in graph.nodes:
        if node.op in COLLECTIVES:
            now_s = free_s = max(now_s, free_s) + link_seconds(node, specs, cluster)
            continue
        if node.op in PIPELINED:
            now_s = free_s = max(now_s, free_s) + node_seconds(node, specs, cluster)
            continue
        if node.op == WAIT:
            now_s = max(now_s, ends_s[node.refs[0].node])
        now_s += node_seconds(node, specs, cluster)
        if node.op in STARTED:
            free_s = max(now_s, free_s) + link_seconds(node, specs, cluster)
            ends_s[node.name] = free_s
    return now_s
