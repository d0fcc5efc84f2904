"""What a stage keeps for its backward, and what it computes again.

A forward that keeps less leaves a checkpoint; the recomputation makes the rest of what the
backward reads from the checkpoint and the stage's own inputs. Which values make the cheapest
checkpoint is a minimum cut: to have a value at the backward one either pays for its bytes, or for
running its node again and for having what that reads. Raising the price of a byte from zero walks
through the best trade-offs of bytes against seconds (those on their convex hull).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import count
from math import inf, isfinite
from typing import NamedTuple

import numpy as np

from merakc.analysis.aliases import is_view
from merakc.costs.device import Place
from merakc.costs.nodes import node_seconds
from merakc.costs.work.flops import COLLECTIVES, PIPELINED
from merakc.ir.graph import Graph, Input, InputKind, Output, OutputKind, Ref
from merakc.ir.program import StageGraphs
from merakc.kernels.opaque import OPAQUE

# Products with weights, and what is fused: no selective recomputation runs them again. A product
# of two activations, the core of an attention, is cheap for the bytes that it gives back
# (Korthikanti et al., "Reducing Activation Recomputation", MLSys 2023, section 5).
KEPT_BY_SELECTIVE = frozenset(
    ("aten.mm.default", "aten.addmm.default", "aten.convolution.default", "aten.linear.default",
     "aten._grouped_mm.default", "merakc.attention.default", "merakc.scores.default",
     "merakc.scaled_mm.default", OPAQUE, *COLLECTIVES, *PIPELINED)
)  # fmt: skip
# Flow is counted in whole numbers, of which scipy takes those of 32 bits.
MAX_FLOW = 2**31 - 1
FLOW_UNITS = 2**29
SOURCE, SINK = 0, 1
PRICE_STEPS = 40  # halvings of the price's interval: to one part in 10^12
# Layers are alike, so that all would flip at one price: later ones count a little more.
TIE_BREAK = 1e-3


def checkpointed(stage: StageGraphs, kept: Collection[Ref]) -> StageGraphs:
    """The stage with a forward that saves no more than `kept`, values of its forward, and with the
    recomputation of the rest.

    The recomputation writes no buffer and makes no output but saved values. Where nothing requires
    a gradient it is empty.
    """
    whole = stage.forward
    saved = [o for o in whole.outputs if o.kind is OutputKind.SAVED]
    results = tuple(o for o in whole.outputs if o.kind is not OutputKind.SAVED)
    specs = whole.specs()
    given = {r: Input(f"saved:{r}", InputKind.SAVED, specs[r], str(r)) for r in sorted_refs(kept)}
    again = replace(
        whole,
        inputs=(*whole.inputs, *given.values()),
        outputs=tuple(o for o in saved if o.ref not in given),
    ).renamed({r: Ref(i.name) for r, i in given.items()})
    again = again.pruned().without_unread_inputs()
    read = {i.name for i in again.inputs}
    wanted = {o.ref for o in saved}
    outputs = tuple(
        Output(str(r), OutputKind.SAVED, r)
        for r, item in given.items()
        if item.name in read or r in wanted
    )
    return replace(
        stage, checkpoint=replace(whole, outputs=(*results, *outputs)).pruned(), recompute=again
    )


def sorted_refs(refs: Collection[Ref]) -> list[Ref]:
    """The references, sorted, so that all ranks have one order."""
    return sorted(refs, key=lambda r: (r.node, r.index))


def selective(stage: StageGraphs) -> frozenset[Ref]:
    """The fewest bytes to keep so that nothing expensive runs again: no product with weights, no
    collective, no attention kernel and no module that runs as it is.
    """
    costs = {n.name: inf if n.op in KEPT_BY_SELECTIVE else 0.0 for n in stage.forward.nodes}
    return Cut(stage, costs).kept(1.0)


def within_bytes(stage: StageGraphs, budget_bytes: int, place: Place) -> frozenset[Ref]:
    """What to keep in at most `budget_bytes` a micro-batch so that recomputing takes least time.

    Found among the cuts of all prices of a byte; seconds are those of kernels, and no collective
    runs again, so that the ranks of a tp group may choose apart. Where even the least that this
    allows is more than the budget, that is kept.
    """
    nodes = stage.forward.nodes
    seconds = _seconds(stage.forward, place)
    costs = {
        n.name: inf
        if n.op in COLLECTIVES or n.op in PIPELINED
        else seconds[n.name] * (1 + TIE_BREAK * k / len(nodes))
        for k, n in enumerate(nodes)
    }
    cut = Cut(stage, costs)
    everything = cut.kept(0.0)
    if kept_bytes(stage, everything) <= budget_bytes:
        return everything
    low, high = 0.0, 1.0
    best = cut.kept(high)
    for _ in range(PRICE_STEPS):
        middle = (low + high) / 2
        found = cut.kept(middle)
        if kept_bytes(stage, found) <= budget_bytes:
            high, best = middle, found
        else:
            low = middle
    return best


def kept_bytes(stage: StageGraphs, kept: Collection[Ref]) -> int:
    """Bytes of kept values, each of memory of its own."""
    specs = stage.forward.specs()
    return sum(specs[r].size_bytes for r in kept)


def _seconds(graph: Graph, place: Place) -> dict[str, float]:
    """The seconds of each node; views take none."""
    specs = graph.specs()
    return {n.name: node_seconds(n, specs, place) for n in graph.nodes}


class _Edge(NamedTuple):
    source: int
    target: int
    capacity: float


class Cut:
    """The network of one stage; `costs` are the seconds of running each node of it again, or
    what else is weighed against bytes.

    Every value that the backward reads hangs on the source, and a value on its node by an edge of
    the price of its bytes: cut, it is kept. A node hangs on the sink by an edge of its seconds, and
    pulls what it reads to its own side. Views are made again from what they look at.
    """

    def __init__(self, stage: StageGraphs, costs: Mapping[str, float]) -> None:
        forward = stage.forward
        wanted = [o.ref for o in forward.outputs if o.kind is OutputKind.SAVED]
        self.values: dict[Ref, int] = {}  # the place of each value in the network
        self.made: list[int] = []  # the place of its node
        self.bytes: list[float] = []
        self.fixed: list[_Edge] = []  # of seconds
        self.held: list[_Edge] = []  # of bytes: received values, which no node makes again
        places = count(2)  # after the source and the sink
        read_anyway = {i.name for i in stage.backward.inputs} if stage.backward else set()
        for item in forward.inputs:
            if item.kind is InputKind.ACTIVATION and item.name not in read_anyway:
                at = self.values[Ref(item.name)] = next(places)
                self.held.append(_Edge(at, SINK, item.spec.size_bytes))
        received = len(self.values)
        for node in forward.nodes:
            place = next(places)
            self.fixed.append(_Edge(place, SINK, costs[node.name]))
            read = (self.values.get(r) for r in dict.fromkeys(node.refs))
            self.fixed += [_Edge(place, at, inf) for at in read if at is not None]
            for k, spec in enumerate(node.outputs):
                if spec is not None:
                    self.values[Ref(node.name, k)] = next(places)
                    self.made.append(place)
                    self.bytes.append(inf if is_view(node) else spec.size_bytes)
        self.own = dict(list(self.values.items())[received:])
        self.fixed += [_Edge(SOURCE, self.own[r], inf) for r in wanted if r in self.own]
        self.size = next(places)
        self.total_s = sum(e.capacity for e in self.fixed if isfinite(e.capacity)) or 1.0
        self.total_bytes = sum(b for b in self.bytes if isfinite(b)) or 1.0

    def kept(self, share: float) -> frozenset[Ref]:
        """The cheapest checkpoint where `share` of the price is for bytes, the rest for seconds.

        Both are relative to those of the whole stage. At equal prices more is kept.
        """
        cut = [
            _Edge(at, node, size)
            for at, node, size in zip(self.own.values(), self.made, self.bytes, strict=True)
        ]
        edges = [
            _Edge(source, target, _part(capacity, 1 - share, self.total_s))
            for source, target, capacity in self.fixed
        ]
        edges += [
            _Edge(source, target, _part(capacity, share, self.total_bytes))
            for source, target, capacity in (*cut, *self.held)
        ]
        reached = _source_side(edges, self.size)
        return frozenset(
            ref
            for (ref, at), node in zip(self.own.items(), self.made, strict=True)
            if at in reached and node not in reached
        )


def _part(capacity: float, share: float, total: float) -> float:
    return capacity if capacity == inf else capacity * share / total


def _source_side(edges: Sequence[_Edge], size: int) -> set[int]:
    """The source's side of a minimum cut; finite capacities add up to about one."""
    from scipy.sparse import csr_array  # as in `choose`
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    scaled = [min(round(e.capacity * FLOW_UNITS), MAX_FLOW) if isfinite(e.capacity) else MAX_FLOW
              for e in edges]  # fmt: skip
    places = [e.source for e in edges], [e.target for e in edges]
    network = csr_array((np.array(scaled, dtype=np.int32), places), shape=(size, size))
    network.eliminate_zeros()
    flow = maximum_flow(network, SOURCE, SINK).flow
    left = network - flow
    left.data[left.data < 0] = 0
    left.eliminate_zeros()
    reached = breadth_first_order(left, SOURCE, return_predecessors=False)
    return {int(place) for place in reached}
