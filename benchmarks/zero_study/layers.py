"""A graph in pieces for the cost model of sharded state: parameters, and the work beside them."""

from __future__ import annotations

from dataclasses import dataclass

from merakc.costs.device import place_on
from merakc.costs.nodes import node_seconds
from merakc.costs.state import Layer
from merakc.ir.graph import Graph, InputKind, Ref
from merakc.machines.cluster import Cluster

# A backward is two forwards: the gradients of both arguments of every product.
BACKWARD_PER_FORWARD = 2.0


@dataclass(slots=True)
class _Open:
    parameters: int = 0
    size_bytes: int = 0
    forward_s: float = 0.0


def graph_layers(
    graph: Graph, cluster: Cluster, bucket_bytes: int, *, recompute: bool = False
) -> list[Layer]:
    """The trained parameters of a forward in the order of first use, in buckets of about that size.

    The seconds of a node count to the bucket that is open when it runs. A recomputed layer runs
    its forward again in the backward.
    """
    specs, place = graph.specs(), place_on(cluster, 1)
    sizes = {
        Ref(i.name): i.spec
        for i in graph.inputs
        if i.kind is InputKind.PARAMETER and i.requires_grad
    }
    found: list[_Open] = [_Open()]
    for node in graph.nodes:
        fresh = [sizes.pop(ref) for ref in dict.fromkeys(node.refs) if ref in sizes]
        if fresh and found[-1].size_bytes >= bucket_bytes:
            found.append(_Open())
        last = found[-1]
        last.parameters += sum(spec.numel for spec in fresh)
        last.size_bytes += sum(spec.size_bytes for spec in fresh)
        last.forward_s += node_seconds(node, specs, place)
    again = BACKWARD_PER_FORWARD + recompute
    return [Layer(o.parameters, o.forward_s, o.forward_s * again) for o in found]
