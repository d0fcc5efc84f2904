"""Communication under computation: the order of a graph's nodes on two resources.

A collective is parted into a start, as early as its input exists, and a wait, as late as its first
reader; what does not depend on it runs in between, in the order of
`merakc.passes.overlap.list_scheduling`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from merakc.analysis.liveness import Memory, live_bytes
from merakc.costs.device import Place, kernel_seconds, launched, traffic_seconds
from merakc.costs.nodes import (
    graph_seconds,
    link_seconds,
    node_seconds,
    pipelined,
    product_seconds,
    ring_backward,
)
from merakc.costs.work.flops import COLLECTIVES, PIPELINED, node_flops
from merakc.costs.work.kernels import node_kernels
from merakc.ir.graph import Graph, InputKind, Node, Ref, TensorSpec
from merakc.ir.program import StageGraphs
from merakc.ir.recompute import run_of
from merakc.kernels.ops import STARTS, WAIT
from merakc.kernels.ring.attention import PLACES as RINGS
from merakc.kernels.ring.swap import SWAP
from merakc.passes.autodiff.rematerialise import late
from merakc.passes.overlap.list_scheduling import Task, list_schedule

# By how many depths nodes that lead to no collective may be put off: all are tried.
LAGS = (0, 1, 4)
# An order that is faster by less than this is not worth more memory.
WORTH = 0.01
# How much longer arithmetic takes beside communication, as Galvatron measured (arXiv 2211.13878).
SLOWDOWN = 1.126
# A backward is about two forwards: the gradients of both arguments of every product.
BACKWARD_PER_FORWARD = 2.0
# What each collective is in the backward; of the others' results every rank has its own part.
CONJUGATES = {
    "merakc.copy_to.default": "merakc.all_reduce.default",
    "merakc.all_reduce.default": "merakc.copy_to.default",
    "merakc.gather_to.default": "merakc.reduce_scatter.default",
    "merakc.reduce_scatter.default": "merakc.all_gather.default",
    "merakc.scatter.default": "merakc.all_gather.default",
    "merakc.all_gather.default": "merakc.copy_to.default",
    "merakc.dispatch.default": "merakc.combine.default",
    "merakc.combine.default": "merakc.dispatch.default",
    "merakc.exchange.default": "merakc.exchange.default",
    SWAP: SWAP,
}
PIECES: Final = ("forward", "backward", "checkpoint", "recompute", "input_grad", "weight_grad")


def overlapped(stage: StageGraphs, place: Place, like: StageGraphs | None = None) -> StageGraphs:
    """The stage with the communication of each of its graphs under their computation.

    The order is that of the stage `like`, where given: ranks of a group must start collectives in
    one order, and costs differ where their parts of tensors do.
    """
    found = {}
    for name in PIECES:
        graph, model = getattr(stage, name), getattr(like or stage, name)
        if graph is not None:
            found[name] = overlap(graph, place, model)
    return replace(stage, **found)


def same_nodes(one: StageGraphs, other: StageGraphs) -> bool:
    """Whether the graphs of two chunks have nodes of the same names and ops, in the same order."""

    def listed(stage: StageGraphs) -> list[list[tuple[str, str]]]:
        graphs = (getattr(stage, name) for name in PIECES)
        return [[(n.name, n.op) for n in graph.nodes] if graph else [] for graph in graphs]

    return listed(one) == listed(other)


def overlap(graph: Graph, place: Place, like: Graph | None = None) -> Graph:
    """The graph in the best order that is found, with its collectives in starts and waits.

    `like` has the same nodes: its costs decide.
    """
    model = like or graph
    if not any(n.op in COLLECTIVES for n in model.nodes):
        return graph
    orders = _orders(model, place)
    graphs = [written(model, order) for order in orders]
    step_s = WORTH * graph_seconds(graphs[0], place)
    prices = [_price(g, place, step_s) for g in graphs]
    best = prices.index(min(prices))
    return graphs[best] if model is graph else written(graph, orders[best])


def _orders(graph: Graph, place: Place) -> list[tuple[str, ...]]:
    """Orders to choose from. What a backward makes again hides no communication: it stands where
    it is read, so that it takes memory as late as can be.
    """
    tasks, nodes = graph_tasks(graph, place), {n.name: n for n in graph.nodes}
    found = []
    for lag in LAGS:
        in_order = tuple(nodes[name] for name in list_schedule(tasks, lag)[1])
        found.append(tuple(n.name for n in late(replace(graph, nodes=in_order)).nodes))
    return list(dict.fromkeys(found))


def _price(graph: Graph, place: Place, step_s: float) -> tuple[int, int]:
    """Seconds, in steps that count, then bytes."""
    saved = (i for i in graph.inputs if i.kind is InputKind.SAVED)
    handed = {i.name: Memory(i.name, i.spec.size_bytes) for i in saved}
    return round(graph_seconds(graph, place) / step_s), live_bytes(graph, handed).peak_bytes


def written(graph: Graph, order: tuple[str, ...]) -> Graph:
    """The graph's nodes in another order, each collective's start in its own place and its wait
    before its first reader. One that is waited for at once stays whole.
    """
    nodes = {n.name: n for n in graph.nodes}
    in_order = [nodes[name] for name in order]
    apart = _parted(in_order)
    done: list[Node] = []
    waited: set[str] = set()

    def wait_for(name: str) -> None:
        if name in apart and name not in waited:
            waited.add(name)
            node = nodes[name]
            args = (Ref(f"{name}.start"),)
            done.append(replace(node, op=WAIT, args=args, kwargs=()))

    for node in in_order:
        for ref in node.refs:
            wait_for(ref.node)
        if node.name in apart:
            node = replace(node, name=f"{node.name}.start", op=STARTS[node.op])
        done.append(node)
    for out in graph.outputs:
        wait_for(out.ref.node)
    return replace(graph, nodes=tuple(done))


def _parted(in_order: list[Node]) -> set[str]:
    """The collectives with something between them and their first reader, or none at all."""
    first: dict[str, int] = {}
    for k, node in enumerate(in_order):
        for ref in node.refs:
            first.setdefault(ref.node, k)
    return {
        n.name
        for k, n in enumerate(in_order)
        if n.op in COLLECTIVES and first.get(n.name, len(in_order)) > k + 1
    }


def graph_tasks(graph: Graph, place: Place) -> list[Task]:
    """What a graph's nodes ask of the two resources. What a backward makes again waits for
    the gradient that enters them: it takes memory no earlier.
    """
    return _forward_tasks(graph, place, _computed_seconds(graph, place))


def _computed_seconds(graph: Graph, place: Place) -> dict[str, float]:
    """Those of the nodes that have nothing to do with the link."""
    specs = graph.specs()
    own = (n for n in graph.nodes if n.op not in COLLECTIVES and n.op not in PIPELINED)
    return {n.name: node_seconds(n, specs, place) for n in own}


def _forward_tasks(graph: Graph, place: Place, computed_s: Mapping[str, float]) -> list[Task]:
    specs, entering = graph.specs(), _entering(graph)
    found = []
    for node in graph.nodes:
        after = tuple(dict.fromkeys(r.node for r in node.refs))
        if (gradient := entering.get(run_of(node.name))) is not None:
            after = tuple(dict.fromkeys((*after, gradient)))
        if node.op in PIPELINED:
            found.append(_pipelined_task(node, after, specs, place))
        elif node.op in COLLECTIVES:
            link_s = link_seconds(node, specs, place)
            found.append(Task(node.name, after, place.device.launch_s, link_s))
        else:
            found.append(Task(node.name, after, computed_s[node.name], 0.0))
    return found


def _entering(graph: Graph) -> dict[int | None, str]:
    """By the runs of blocks that a backward makes again, the gradient by which its calls behind
    them begin; none of a run before which nothing was computed.
    """
    found: dict[int | None, str] = {}
    tangents = {i.name for i in graph.inputs if i.kind is InputKind.TANGENT}
    place = dict.fromkeys(tangents, -1)  # of gradients
    first: dict[int, int] = {}
    for k, node in enumerate(graph.nodes):
        run = run_of(node.name)
        if run is not None:
            first.setdefault(run, k)
            continue
        read = [r.node for r in node.refs if r.node in place]
        if not read:
            continue
        place[node.name] = k
        for own, start in list(first.items()):
            before = [name for name in read if place[name] < start]
            if before:
                found[own] = max(before, key=place.__getitem__)
                del first[own]
    return {run: name for run, name in found.items() if name not in tangents}


def _stage_tasks(local: Graph, place: Place) -> tuple[list[Task], list[Task]]:
    """Those of a stage's forward and of the backward that it will have."""
    computed_s = _computed_seconds(local, place)
    return _forward_tasks(local, place, computed_s), _backward_tasks(local, place, computed_s)


def _pipelined_task(
    node: Node, after: tuple[str, ...], specs: Mapping[Ref, TensorSpec], place: Place
) -> Task:
    """A product and its collective in one, slowed down by what they do at once."""
    own = pipelined(node, specs, place)
    slower_s = (SLOWDOWN - 1) * own.hidden_s
    return Task(node.name, after, own.seconds + slower_s, 0.0, holds_link=True)


def stage_seconds(local: Graph, place: Place) -> tuple[float, float]:
    """Seconds of a stage's forward and backward, overlapped and blocking, from its forward alone:
    for planning, where nothing is differentiated.

    A backward has a task for each of the forward's on trained values, in reverse, and one for the
    weights of those that read parameters, which adds to the gradient where another has read them
    too; its collectives are the conjugates of the forward's.
    """
    overlapped_s = blocking_s = 0.0
    for tasks in local.told(_stage_tasks, place):
        compute_s, link_s = sum(t.compute_s for t in tasks), sum(t.link_s for t in tasks)
        end_s, _ = list_schedule(tasks, LAGS[0])
        hidden_s = compute_s + link_s - end_s
        overlapped_s += end_s + (SLOWDOWN - 1) * max(hidden_s, 0.0)
        blocking_s += compute_s + link_s
    return min(overlapped_s, blocking_s), blocking_s


def least_share(local: Graph, place: Place) -> float:
    """The share of a stage's blocking seconds that no form of it beats: what is computed, with all
    communication hidden, which makes arithmetic beside it slower.

    Parts and chunks compute at least what the whole does, since each reads its weights again and
    is launched by itself, and communicate for as long at the least. Products in one op with their
    collective can share what they read and are launched together, so of them only the arithmetic
    counts.
    """
    specs = local.specs()
    saved_s = blocking_s = 0.0
    for tasks in local.told(_stage_tasks, place):
        blocking_s += sum(t.compute_s + t.link_s for t in tasks)
        saved_s += (2 - SLOWDOWN) * sum(t.link_s for t in tasks)
    if place.symmetric_memory:
        for node in local.nodes:
            if node.op in COLLECTIVES:
                saved_s += 2 * place.device.launch_s
            elif node_flops(node, specs):
                kernel, *others = node_kernels(node, specs)
                if not others:  # a loss in blocks is never one op with a collective
                    arithmetic_s = kernel_seconds(kernel._replace(traffic_bytes=0), place.device)
                    saved_s += 3 * (node_seconds(node, specs, place) - arithmetic_s)
    return 1.0 - saved_s / blocking_s if blocking_s else 1.0


def _backward_tasks(local: Graph, place: Place, computed_s: Mapping[str, float]) -> list[Task]:
    grads, specs, readers = local.grad_values(), local.specs(), local.users()
    trained = {i.name for i in local.inputs if i.kind is InputKind.PARAMETER and i.requires_grad}
    made: set[str] = set()
    summed: set[str] = set()  # parameters of which a gradient is there to be added to
    found: list[Task] = []
    for node in reversed(local.nodes):
        if grads.isdisjoint(node.outs):
            continue
        after = tuple(n.name for n in readers[node.name] if n.name in made)
        made.add(node.name)
        if node.op in PIPELINED:
            found += _pipelined_backward(node, after, specs, place)
            continue
        own_s = place.device.launch_s if node.op in CONJUGATES else computed_s[node.name]
        link_s = 0.0
        if node.op in CONJUGATES:
            conjugate = replace(node, op=CONJUGATES[node.op])
            link_s = link_seconds(conjugate, specs, place)
        elif read := {r.node for r in node.refs if r.node in trained}:
            again_s = sum(
                traffic_seconds(3 * specs[Ref(name)].size_bytes, place.device)
                + place.device.launch_s
                for name in sorted(read & summed)
            )
            summed |= read
            found.append(Task(f"{node.name} weights", after, own_s + again_s, 0.0))
        else:
            own_s *= BACKWARD_PER_FORWARD
        found.append(Task(node.name, after, own_s, link_s))
    return found


def _pipelined_backward(
    node: Node, after: tuple[str, ...], specs: Mapping[Ref, TensorSpec], place: Place
) -> list[Task]:
    """The other one of the two for what the node read, and products for the weights.

    Several weights, and the gradients of their products, are put together for it. Behind a scatter
    the weights wait for what it gathers.
    """
    if node.op in RINGS:
        return [_pipelined_task(ring_backward(node, specs), after, specs, place)]
    weights, launch_s = list(dict.fromkeys(node.refs))[1:], place.device.launch_s
    own = _pipelined_task(node, after, specs, place)
    if len(weights) > 1:
        parts = [specs[w] for w in weights] + [o for o in node.outputs[1:] if o is not None]
        joined_s = traffic_seconds(2 * sum(part.size_bytes for part in parts), place.device)
        own = own._replace(compute_s=own.compute_s + joined_s + 2 * launch_s)
    of_weights_s = launched(product_seconds(node, specs, place), len(weights) * launch_s)
    if node.op == "merakc.matmul_scatter.default":
        after = (node.name,)
    return [own, Task(f"{node.name} weights", after, of_weights_s, 0.0)]
