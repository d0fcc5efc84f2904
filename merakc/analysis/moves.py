"""The check of what leaves a stage's device for the host and comes back, in its own graphs.

A copy runs beside the computing: nothing in a graph says that its source must live, or that its
target is not there yet, but the places of its start and its end. So these are followed through all
pieces of a micro-batch, in the order in which they run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from merakc.analysis.aliases import last_uses
from merakc.analysis.liveness import owners
from merakc.errors import ProgramError
from merakc.ir.graph import Graph, InputKind, Node, OutputKind
from merakc.ir.program import ActionKind, StageGraphs
from merakc.kernels.ops import BACK, GONE, OUT, REST, WAIT


def verify_moves(stage: StageGraphs, order: Sequence[ActionKind]) -> None:
    """Checks the moves of a micro-batch's pieces, run in this order.

    A value leaves once, whole or so many elements of it, of which the rest stays; from the end of
    its copy on nobody reads it, nor is it kept. It comes back once in each piece that reads it, of
    the size that it had, with its rest, and is read behind the end of that copy alone.

    Raises `ProgramError`, which names the piece and the call.
    """
    away: dict[str, _Away] = {}  # by the key of what is on the host
    rests: dict[str, _Away] = {}
    for kind, graph in zip(order, stage.pieces(order), strict=True):
        if graph is None:
            continue
        found = _Piece(str(kind), graph)
        found.come_back(away, rests)
        for one in found.leave():
            away[one.host], rests[one.rest] = one, one
    idle = next((one for one in away.values() if not one.came), None)
    if idle is not None:
        raise ProgramError(f"{idle.host}: nothing brings it back")


@dataclass(slots=True)
class _Away:
    """A value on the host: so many of its elements, kept under `host`, the others under `rest`."""

    host: str
    rest: str
    count: int
    numel: int
    came: int = 0


@dataclass(slots=True)
class _Piece:
    """One graph of a stage."""

    kind: str
    graph: Graph
    nodes: dict[str, Node] = field(init=False)

    def __post_init__(self) -> None:
        self.nodes = {node.name: node for node in self.graph.nodes}

    def leave(self) -> Iterable[_Away]:
        """What has left when the piece ends."""
        outs = [n for n in self.graph.nodes if n.op == OUT]
        ends: dict[str, Node] = {}
        for node in self.graph.nodes:
            if node.op == GONE:
                start = self._start(node, OUT)
                self._check(start.name not in ends, node, "ends a move a second time")
                self._check(node.args[1] == start.args[0], node, "ends the move of another value")
                ends[start.name] = node
        home, specs = owners(self.graph), self.graph.specs()
        kept = {home[o.ref]: o for o in self.graph.outputs if o.kind is OutputKind.SAVED}
        last, at = last_uses(self.graph, home), {n.name: k for k, n in enumerate(self.graph.nodes)}
        moving = Counter(home[n.args[0]] for n in outs)
        for node in outs:
            owner = home[node.args[0]]
            self._check(moving[owner] == 1, node, "moves its value twice")
            self._check(node.name in ends, node, "its end is not waited for")
            reader = self.graph.nodes[last[owner]]
            self._check(last[owner] <= at[ends[node.name].name], reader, "reads what is out")
            self._check(owner not in kept, node, "its value is kept, too")
            yield self._away(ends[node.name], node, specs[node.args[0]].numel)
        self._read_alone(OUT, (GONE,))
        self._read_alone(GONE, ())

    def _away(self, end: Node, start: Node, numel: int) -> _Away:
        count: int = start.args[1]
        self._check(0 < count <= numel, start, f"moves {count} of {numel} elements")
        rests = [n for n in self.graph.nodes if n.op == REST and n.args == start.args]
        is_whole = count == numel
        self._check(len(rests) == (not is_whole), start, f"{len(rests)} rests of its value stay")
        names = {o.ref.node: o.name for o in self.graph.outputs if o.kind is OutputKind.SAVED}
        self._check(end.name in names, end, "is not kept")
        self._check(is_whole or rests[0].name in names, start, "its rest is not kept")
        return _Away(names[end.name], "" if is_whole else names[rests[0].name], count, numel)

    def come_back(self, away: dict[str, _Away], rests: dict[str, _Away]) -> None:
        """Checks what comes back in the piece, of what has left before."""
        saved = {i.name: i.target for i in self.graph.inputs if i.kind is InputKind.SAVED}
        starts = [n for n in self.graph.nodes if n.op == BACK]
        for node in starts:
            host, *others = (saved.get(r.node, "") for r in node.refs)
            one = away.get(host)
            self._check(one is not None, node, "brings back what has not left")
            assert one is not None
            same = node.spec.numel == one.numel
            self._check(same, node, f"has {node.spec.numel} elements, of {one.numel} that left")
            self._check(
                others == [one.rest] * bool(one.rest), node, "has not the rest of its value"
            )
            one.came += 1
        self._read_alone(BACK, (WAIT,))
        readers = self.graph.users()
        for name, target in saved.items():
            if target in away or target in rests:
                read = readers[name]
                outs = any(o.ref.node == name for o in self.graph.outputs)
                alone = len(read) == 1 and read[0].op == BACK and not outs
                self._check(alone, read[-1] if read else name, f"reads {target}, which is out")
        for node in self.graph.nodes:
            if node.op == WAIT and self.nodes.get(node.refs[0].node, node).op == OUT:
                raise ProgramError(f"{self.kind}, {node}: waits for a move out as for one back")

    def _read_alone(self, op: str, by: Sequence[str]) -> None:
        """What these calls make is read once, by calls of that kind."""
        readers = self.graph.users()
        for node in self.graph.nodes:
            if node.op == op:
                read = readers[node.name]
                early = [n for n in read if n.op not in by]
                if early or (by and len(read) != 1):
                    wrong = early[0] if early else node
                    raise ProgramError(f"{self.kind}, {wrong}: {node.name} is still on its way")

    def _start(self, node: Node, op: str) -> Node:
        start = self.nodes.get(node.refs[0].node, node)
        self._check(start.op == op, node, "ends no move out")
        return start

    def _check(self, holds: bool, at: Node | str, fault: str) -> None:
        if not holds:
            raise ProgramError(f"{self.kind}, {at}: {fault}")
