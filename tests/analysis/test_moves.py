"""Moves with a fault put in are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from merakc.analysis.moves import verify_moves
from merakc.errors import ProgramError
from merakc.ir.graph import Graph, Node, Ref
from merakc.ir.program import StageGraphs
from merakc.kernels.ops import BACK, GONE, OUT, REST, WAIT
from merakc.passes.offload.choose import chosen
from merakc.passes.offload.moves import moved
from tests.passes.offload.lines import SPLIT, WHOLE, at, chain


def stage(*, split: bool = False) -> StageGraphs:
    place = at(1e10)
    return moved(chain(split=split), chosen(chain(split=split), 0.45, place), place)


def find(graph: Graph, op: str, last: bool = False) -> int:
    places = [k for k, n in enumerate(graph.nodes) if n.op == op]
    return places[-1 if last else 0]


def put(graph: Graph, k: int, *nodes: Node) -> Graph:
    """The graph with these in the place of a node."""
    return replace(graph, nodes=(*graph.nodes[:k], *nodes, *graph.nodes[k + 1 :]))


def reader(name: str, spec: Node) -> Node:
    return Node("late", "aten.neg.default", (Ref(name),), (), spec.outputs)


def read_late(g: Graph) -> Graph:
    source = g.nodes[find(g, OUT)].args[0]
    maker = next(n for n in g.nodes if n.name == source.node)
    return replace(g, nodes=(*g.nodes, reader(source.node, maker)))


def kept_too(g: Graph) -> Graph:
    saved = next(o for o in g.outputs if o.name.endswith(".host"))
    source = g.nodes[find(g, OUT)].args[0]
    return replace(g, outputs=(*g.outputs, replace(saved, name="kept", ref=source)))


def doubled(op: str) -> Callable[[Graph], Graph]:
    def change(g: Graph) -> Graph:
        node = g.nodes[find(g, op)]
        return put(g, find(g, op), node, replace(node, name="second"))

    return change


def other_end(g: Graph) -> Graph:
    """The end of a move waits for another."""
    first, last = g.nodes[find(g, OUT)], g.nodes[find(g, GONE, last=True)]
    return put(g, find(g, GONE, last=True), replace(last, args=(Ref(first.name), last.args[1])))


def no_end(g: Graph) -> Graph:
    k = find(g, GONE)
    gone = g.nodes[k]
    found = put(g, k)
    outputs = tuple(
        replace(o, ref=gone.args[0]) if o.ref.node == gone.name else o for o in g.outputs
    )
    return replace(found, outputs=outputs)


def counted(count: int) -> Callable[[Graph], Graph]:
    def change(g: Graph) -> Graph:
        k = next(k for k, n in enumerate(g.nodes) if n.op == OUT and n.args[1] < 4096)
        return put(g, k, replace(g.nodes[k], args=(g.nodes[k].args[0], count)))

    return change


def no_rest(g: Graph) -> Graph:
    k = find(g, REST)
    name = g.nodes[k].name
    return replace(put(g, k), outputs=tuple(o for o in g.outputs if o.ref.node != name))


def unwaited(g: Graph) -> Graph:
    """What comes back is read as soon as its copy has started."""
    k = find(g, WAIT)
    start = g.nodes[k].args[0]
    return put(g, k).renamed({Ref(g.nodes[k].name): start})


def from_host(g: Graph) -> Graph:
    """What is on the host is read there."""
    start = g.nodes[find(g, BACK)]
    return replace(g, nodes=(*g.nodes, reader(start.args[0].node, start)))


def other_rest(g: Graph) -> Graph:
    k = next(k for k, n in enumerate(g.nodes) if n.op == BACK and len(n.args) == 2)
    return put(g, k, replace(g.nodes[k], args=g.nodes[k].args[:1]))


def not_back(g: Graph) -> Graph:
    """A value that left stays away."""
    start, k = g.nodes[find(g, BACK)], find(g, BACK)
    wait = find(g, WAIT)
    made = Node(g.nodes[wait].name, "aten.zeros.default", (64, 64), (), g.nodes[wait].outputs)
    found = put(put(g, wait, made), k)
    gone = {r.node for r in start.refs}
    return replace(found, inputs=tuple(i for i in g.inputs if i.name not in gone))


FORWARD = {
    "reads what is out": read_late,
    "its value is kept, too": kept_too,
    "moves its value twice": doubled(OUT),
    "ends a move a second time": doubled(GONE),
    "ends the move of another value|ends a move a second time": other_end,
    "its end is not waited for": no_end,
    "moves 0 of 4096 elements": counted(0),
    "moves 5000 of 4096 elements": counted(5000),
    "has not the rest of its value": counted(4096),
    "0 rests of its value stay": no_rest,
}
BACKWARD = {
    "second is still on its way|which is out": doubled(BACK),
    "is still on its way": unwaited,
    "reads .* which is out": from_host,
    "has not the rest of its value|which is out": other_rest,
    "nothing brings it back": not_back,
}


@pytest.mark.parametrize("split", [False, True])
def test_moves_as_they_are_made_pass(split: bool) -> None:
    verify_moves(stage(split=split), SPLIT if split else WHOLE)
    verify_moves(chain(), WHOLE)


@pytest.mark.parametrize("fault", FORWARD)
def test_faults_on_the_way_out_are_refused(fault: str) -> None:
    made = stage()
    with pytest.raises(ProgramError, match=fault):
        verify_moves(replace(made, forward=FORWARD[fault](made.forward)), WHOLE)


@pytest.mark.parametrize("fault", BACKWARD)
def test_faults_on_the_way_back_are_refused(fault: str) -> None:
    made = stage()
    assert made.backward is not None
    with pytest.raises(ProgramError, match=fault):
        verify_moves(replace(made, backward=BACKWARD[fault](made.backward)), WHOLE)
