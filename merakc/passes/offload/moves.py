"""Writes moves to the host and back into the graphs of a stage.

A value starts to leave right behind the call that makes it. The copy is waited for where it should
have ended and nothing in the forward reads the value any more: from there on its memory is free. It
comes back as late as its copy still ends before its first reader, behind the copies that are wanted
before: links carry one at a time, each way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from merakc.analysis.aliases import last_uses
from merakc.analysis.liveness import owners
from merakc.analysis.moves import verify_moves
from merakc.costs.device import Place
from merakc.costs.nodes import start_seconds
from merakc.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorSpec
from merakc.ir.program import ActionKind, StageGraphs
from merakc.kernels.ops import BACK, GONE, OUT, REST, WAIT
from merakc.machines.links import Link
from merakc.passes.offload.choose import READERS, chosen

# So many times the seconds of its copy before its first reader a value starts to come back: other
# traffic on the link, and clocks, vary.
AHEAD = 1.25
Inserts = dict[int, list[Node]]  # by the position of the node that they stand before


def offloaded(stage: StageGraphs, share: float, place: Place) -> StageGraphs:
    """The stage of which `share` of what may wait on the host does. Raises `ProgramError` where the
    check of its moves finds a fault.
    """
    made = moved(stage, chosen(stage, share, place), place)
    split = made.input_grad is not None
    last = (ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD) if split else (ActionKind.BACKWARD,)
    verify_moves(made, (ActionKind.FORWARD, *last))
    return made


def moved(stage: StageGraphs, counts: Mapping[str, int], place: Place) -> StageGraphs:
    """The stage whose forward moves so many elements of saved values to the host, by the names of
    its outputs, and whose backward brings them back.
    """
    if not counts:
        return stage
    graphs = {name: getattr(stage, name) for name in READERS}
    back = {n: _brought(g, counts, place) for n, g in graphs.items() if g is not None}
    return replace(stage, forward=_moved_out(stage.forward, counts, place), **back)


def _moved_out(forward: Graph, counts: Mapping[str, int], place: Place) -> Graph:
    nodes, specs = forward.nodes, forward.specs()
    at = {node.name: k for k, node in enumerate(nodes)}
    starts_s, home = _starts(forward, place), owners(forward)
    last = last_uses(forward, home)
    link, free_s = _link(place, back=False), 0.0
    outs: Inserts = defaultdict(list)
    ends: Inserts = defaultdict(list)
    given: dict[str, list[Output]] = {}
    leaving = [o for o in forward.outputs if o.name in counts]
    for out in sorted(leaving, key=lambda o: at[o.ref.node]):
        behind, spec = at[out.ref.node] + 1, specs[out.ref]
        unread = last[home[out.ref]] + 1
        part = TensorSpec((counts[out.name],), spec.dtype)
        free_s = max(free_s, starts_s[behind]) + link.seconds(part.size_bytes)
        end = next(k for k in range(unread, len(starts_s)) if _by(starts_s, k, free_s))
        start, count = f"{out.name}.out", counts[out.name]
        outs[behind].append(Node(start, OUT, (out.ref, count), (), (part,)))
        gone = Node(f"{out.name}.host", GONE, (Ref(start), out.ref), (), (part,))
        given[out.name] = [Output(gone.name, OutputKind.SAVED, Ref(gone.name))]
        if count < spec.numel:
            left = TensorSpec((spec.numel - count,), spec.dtype)
            rest = Node(f"{out.name}.rest", REST, (out.ref, count), (), (left,))
            ends[end].append(rest)
            given[out.name].append(Output(rest.name, OutputKind.SAVED, Ref(rest.name)))
        ends[end].append(gone)
    outputs = (one for o in forward.outputs for one in given.get(o.name, [o]))
    return replace(forward, nodes=_inserted(nodes, outs, ends), outputs=tuple(outputs))


def _by(starts_s: Sequence[float], k: int, seconds: float) -> bool:
    """Whether so many seconds have passed when a node begins; of the end, in any case."""
    return k == len(starts_s) - 1 or starts_s[k] >= seconds


def _brought(graph: Graph, counts: Mapping[str, int], place: Place) -> Graph:
    coming = [i for i in graph.inputs if i.kind is InputKind.SAVED and i.target in counts]
    if not coming:
        return graph
    nodes, starts_s, readers = graph.nodes, _starts(graph, place), graph.users()
    at = {node.name: k for k, node in enumerate(nodes)}
    first = {i.name: min((at[n.name] for n in readers[i.name]), default=len(nodes)) for i in coming}
    link, free_s = _link(place, back=True), starts_s[-1]
    starts: Inserts = defaultdict(list)
    waits: Inserts = defaultdict(list)
    names: dict[Ref, Ref] = {}
    given: dict[str, list[Input]] = {}
    for item in sorted(coming, key=lambda i: -first[i.name]):
        count, spec, reader = counts[item.target], item.spec, first[item.name]
        given[item.name] = _given(item, count)
        seconds = AHEAD * link.seconds(count * spec.dtype.itemsize)
        free_s = min(free_s, starts_s[reader]) - seconds
        begin = max((k for k in range(reader + 1) if starts_s[k] <= free_s), default=0)
        start, back = f"{item.name}.start", f"{item.name}.back"
        read = tuple(Ref(i.name) for i in given[item.name])
        starts[begin].insert(0, Node(start, BACK, read, (), (spec,)))
        waits[reader].append(Node(back, WAIT, (Ref(start),), (), (spec,)))
        names[Ref(item.name)] = Ref(back)
    inputs = tuple(one for i in graph.inputs for one in given.get(i.name, [i]))
    made = replace(graph.renamed(names), inputs=inputs)
    return replace(made, nodes=_inserted(made.nodes, starts, waits))


def _given(item: Input, count: int) -> list[Input]:
    """What stands for a saved value: its part on the host, and the rest."""
    sizes = {"host": count, "rest": item.spec.numel - count}
    return [
        replace(
            item, name=f"{item.name}.{part}", target=f"{item.target}.{part}",
            spec=TensorSpec((size,), item.spec.dtype),
        )
        for part, size in sizes.items()
        if size
    ]  # fmt: skip


def _inserted(nodes: Sequence[Node], first: Inserts, then: Inserts) -> tuple[Node, ...]:
    """The nodes, with others before them."""
    found: list[Node] = []
    for k in range(len(nodes) + 1):
        found += [*first.get(k, ()), *then.get(k, ()), *nodes[k : k + 1]]
    return tuple(found)


def _starts(graph: Graph, place: Place) -> list[float]:
    """When each node begins, and when the last has ended."""
    starts_s = start_seconds(graph, place)
    return [*(starts_s[n.name] for n in graph.nodes), starts_s[""]]


def _link(place: Place, *, back: bool) -> Link:
    """What carries a copy while others compute; cores that do both gain nothing by waiting."""
    if place.host is None or place.fabric.by_cores:
        return Link(0.0, float("inf"))
    return place.host.up if back else place.host.down
