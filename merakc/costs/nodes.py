"""Seconds of nodes and of graphs: the kernel that each node runs, one after the other.

Collectives that are only started run beside, one after the other, and a wait lasts until its own
has ended. A collective in one node with products waits for the link, as one that blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from merakc.costs.device import (
    Place,
    collective_seconds,
    kernel_seconds,
    launched,
    traffic_seconds,
    work_seconds,
)
from merakc.costs.work.flops import COLLECTIVES, PIPELINED, wire_bytes
from merakc.costs.work.kernels import KernelKind, collective_kernel, node_kernels
from merakc.ir.costs import GraphCollective, GraphCollectives
from merakc.ir.graph import Graph, Node, Ref, TensorSpec
from merakc.ir.program import ActionKind, StageGraphs
from merakc.kernels.attention_formulas import lse_dtype
from merakc.kernels.ops import BACK, GONE, OUT, STARTED, WAIT
from merakc.kernels.ring.attention import PLACES as RINGS

# The calls that are launched for a block that is passed on: a kernel, what adds its result to those
# of others, copies, and the send.
RING_CALLS = 8
Specs = Mapping[Ref, TensorSpec]


def node_seconds(node: Node, specs: Specs, place: Place) -> float:
    """Seconds of one node by itself; of one that starts a collective, those of the call."""
    if node.op in STARTED or node.op == OUT:
        return place.device.launch_s
    if node.op in PIPELINED:
        return pipelined(node, specs, place).seconds
    return work_seconds(dict.fromkeys(node_kernels(node, specs), 1), place)


def link_seconds(node: Node, specs: Specs, place: Place) -> float:
    """Seconds of a node's collective on the link, blocking, started or beside products; of other
    nodes 0.
    """
    op = PIPELINED.get(node.op) or STARTED.get(node.op, node.op)
    if op not in COLLECTIVES:
        return 0.0
    if node.op in RINGS:  # of the ranks of a node the last sends to another, as in a gather
        op = "merakc.all_gather.default"
    return collective_seconds(collective_kernel(node, op, wire_bytes(node, specs)), place)


def move_seconds(node: Node, specs: Specs, place: Place) -> float:
    """Seconds of a move to the host or back, on its link; of other nodes, and where nothing is
    known of a host, 0.
    """
    if place.host is None or node.op not in (OUT, BACK):
        return 0.0
    if node.op == OUT:
        return place.host.down.seconds(node.spec.size_bytes)
    return place.host.up.seconds(specs[node.refs[0]].size_bytes)


def divided_seconds(node: Node, specs: Specs, place: Place) -> float:
    """Those of a node's seconds that ranks share if they split it: without what any call takes."""
    seconds = 0.0
    for kernel in node_kernels(node, specs):
        if kernel.kind is KernelKind.TRAFFIC:
            seconds += traffic_seconds(kernel.traffic_bytes, place.device)
        elif kernel.kind is not KernelKind.COLLECTIVE:
            seconds += kernel_seconds(kernel, place.device)
    return seconds


@dataclass(frozen=True, slots=True)
class Pipelined:
    """Seconds of products and the collective beside them in one node, launched by `host_s`.

    The device takes `device_s`, of which it waits `exposed_s` for the link; `hidden_s` of the link
    are under the products.
    """

    device_s: float
    host_s: float
    exposed_s: float
    hidden_s: float

    @property
    def wire_s(self) -> float:
        """Those of the collective."""
        return self.exposed_s + self.hidden_s

    @property
    def seconds(self) -> float:
        """All, launches included."""
        return launched(self.device_s, self.host_s)


def pipelined(node: Node, specs: Specs, place: Place, factor: float = 1.0) -> Pipelined:
    """What a node of `PIPELINED` takes: one after the other, or pipelined in symmetric memory.

    There it goes rank by rank: products of one part of the rows while the next is copied. The
    longer of the two hides the shorter, but for its first part. Every part is a call and a step of
    the link of its own, and reads the weights; where the parts are none of consecutive rows, torch
    puts them in order first. Products take `factor` times what formulas say.
    """
    if node.op in RINGS:
        return _passed_around(node, specs, place, factor)
    *_, dim, sizes, _ = node.args
    parts = len(sizes) if place.symmetric_memory else 1
    wire_s = link_seconds(node, specs, place)
    product_s = product_seconds(node, specs, place, parts)
    if parts > 1 and math.prod(specs[node.refs[0]].shape[:dim]) > 1:
        ordered = (specs[node.refs[0]], *(o for o in node.outputs if o is not None))
        product_s += traffic_seconds(2 * sum(o.size_bytes for o in ordered), place.device)
    product_s, host_s = factor * product_s, factor * parts * place.device.launch_s
    hidden_s = min(product_s, wire_s) * (1 - 1 / parts)
    return Pipelined(product_s + wire_s - hidden_s, host_s, wire_s - hidden_s, hidden_s)


def _passed_around(node: Node, specs: Specs, place: Place, factor: float) -> Pipelined:
    """The same, of an attention to which keys and values are passed around: a block is under way
    while another is attended to, and its result is added to that of the others.
    """
    hops, at, device = len(node.args[-3]), RINGS[node.op], place.device
    result = specs[node.args[at]]
    joined_bytes = 3 * hops * result.numel * lse_dtype(result.dtype).itemsize
    product_s = product_seconds(node, specs, place) + traffic_seconds(joined_bytes, device)
    product_s, wire_s = factor * product_s, link_seconds(node, specs, place)
    hidden_s = min(product_s, wire_s) * (1 - 1 / hops)
    host_s = factor * hops * RING_CALLS * device.launch_s
    return Pipelined(product_s + wire_s - hidden_s, host_s, wire_s - hidden_s, hidden_s)


def ring_backward(node: Node, specs: Specs) -> Node:
    """The backward of an attention to which keys and values are passed around."""
    q, k, v, mask, causal, scale, _, *ring = node.args
    out, logsumexp = node.made
    args = (out, q, k, v, out, logsumexp, mask, causal, scale, *ring)
    outputs = specs[q], specs[k], specs[v]
    return replace(node, op="merakc.ring_attention_backward.default", args=args, outputs=outputs)


def product_seconds(node: Node, specs: Specs, place: Place, parts: int = 1) -> float:
    """Seconds of the products of a node of `PIPELINED`, whose weights are read by every part."""
    (kernel,) = node_kernels(node, specs)
    _, *weights = dict.fromkeys(node.refs)
    moved_bytes = kernel.traffic_bytes + (parts - 1) * sum(specs[w].size_bytes for w in weights)
    return kernel_seconds(kernel._replace(traffic_bytes=moved_bytes), place.device)


def graph_seconds(graph: Graph, place: Place, factor: float = 1.0) -> float:
    """Seconds of all nodes in their order. Those that are no collectives take `factor` times what
    formulas say, launches included.
    """
    return _walked(graph, place, factor).seconds


def start_seconds(graph: Graph, place: Place) -> dict[str, float]:
    """When each node begins, in seconds since the first; and under "" when the last has ended."""
    walk = _walked(graph, place)
    return walk.starts_s | {"": walk.now_s}


def graph_collectives(graph: Graph, place: Place) -> tuple[GraphCollective, ...]:
    """The collectives of a graph, in the order in which they are issued."""
    if not any(n.op in COLLECTIVES or n.op in STARTED or n.op in PIPELINED for n in graph.nodes):
        return ()
    walk = _walked(graph, place)
    return tuple(
        GraphCollective(
            _name(node), _axis(node), wire_bytes(node, walk.specs), *(s / walk.now_s for s in own_s)
        )
        for node, own_s in walk.collectives.values()
    )


def chunk_collectives(stage: int, chunk: StageGraphs, place: Place) -> GraphCollectives:
    """Those of a stage's graphs, by what runs them."""
    graphs = {(kind, False): chunk.piece(kind) for kind in ActionKind if kind.is_compute} | {
        (ActionKind.FORWARD, True): chunk.checkpoint
    }
    return {(stage, *of): graph_collectives(graph, place) for of, graph in graphs.items() if graph}


@dataclass(slots=True)
class _Walk:
    """The device and the link along a graph. `collectives` have their start and end, and those of
    the wait for them; the host launches ahead.
    """

    specs: Specs
    now_s: float = 0.0
    free_s: float = 0.0  # the link
    host_s: float = 0.0
    collectives: dict[str, tuple[Node, list[float]]] = field(default_factory=dict)
    moves: dict[str, float] = field(default_factory=dict)  # to the host and back: when they end
    links_s: dict[str, float] = field(default_factory=dict)  # when those are free, by op
    starts_s: dict[str, float] = field(default_factory=dict)  # when the nodes begin

    @property
    def seconds(self) -> float:
        """Those of the whole graph."""
        return launched(self.now_s, self.host_s)


def _walked(graph: Graph, place: Place, factor: float = 1.0) -> _Walk:
    walk, launch_s = _Walk(graph.specs()), factor * place.device.launch_s
    for node in graph.nodes:
        walk.starts_s[node.name] = walk.now_s
        if node.op in PIPELINED:
            _beside(walk, node, pipelined(node, walk.specs, place, factor))
        elif node.op in COLLECTIVES:
            start_s, wire_s = walk.now_s, link_seconds(node, walk.specs, place)
            walk.now_s = walk.free_s = max(walk.now_s, walk.free_s) + wire_s
            walk.collectives[node.name] = node, [start_s, walk.now_s] * 2
            walk.host_s += launch_s
        elif node.op in STARTED:
            start_s = walk.now_s
            walk.free_s = max(start_s, walk.free_s) + link_seconds(node, walk.specs, place)
            walk.collectives[node.name] = node, [start_s, *[walk.free_s] * 3]
            walk.host_s += launch_s
        elif node.op == GONE or (node.op == WAIT and node.refs[0].node in walk.moves):
            walk.now_s = max(walk.now_s, walk.moves[node.refs[0].node])
        elif node.op == WAIT:
            own_s = walk.collectives[node.refs[0].node][1]
            own_s[2:] = walk.now_s, max(walk.now_s, own_s[1])
            walk.now_s = own_s[3]
        else:
            if node.op in (OUT, BACK):
                _move(walk, node, place)
            for kernel in node_kernels(node, walk.specs):
                walk.host_s += launch_s
                if kernel.kind is KernelKind.COLLECTIVE:
                    walk.now_s += collective_seconds(kernel, place)
                else:
                    walk.now_s += factor * kernel_seconds(kernel, place.device)
    return walk


def _move(walk: _Walk, node: Node, place: Place) -> None:
    """Starts a move, on its way's own link, or where cores do all the copying, makes it."""
    seconds = move_seconds(node, walk.specs, place)
    walk.host_s += place.device.launch_s
    free_s = max(walk.now_s, walk.links_s.get(node.op, 0.0))
    walk.moves[node.name] = walk.links_s[node.op] = free_s + seconds
    if place.fabric.by_cores:
        walk.now_s += seconds


def _beside(walk: _Walk, node: Node, own: Pipelined) -> None:
    """What of a collective its products do not hide is before the first, or behind the last."""
    start_s = max(walk.now_s, walk.free_s)
    end_s = walk.now_s = walk.free_s = start_s + own.device_s
    walk.host_s += own.host_s
    if node.op == "merakc.matmul_scatter.default":
        spans = [end_s - own.wire_s, end_s, end_s - own.exposed_s, end_s]
    else:
        spans = [start_s, start_s + own.wire_s, start_s, start_s + own.exposed_s]
    walk.collectives[node.name] = node, spans


_SENT_AS = {
    "gather_to": "all_gather", "dispatch": "all_to_all", "combine": "all_to_all",
    "exchange": "all_to_all", "swap": "all_to_all",
}  # fmt: skip


def _name(node: Node) -> str:
    """What the runtime calls it."""
    op = PIPELINED.get(node.op) or STARTED.get(node.op, node.op)
    name = op.split(".")[1]
    return _SENT_AS.get(name, name)


def _axis(node: Node) -> str:
    """The mesh axis that it runs over: the first name among its arguments."""
    return next(arg for arg in node.args if isinstance(arg, str))
