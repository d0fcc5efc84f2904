"""Recordings of which only what Python made of the batch differs: a common form of both.

A forward may go through the samples one by one to make positions, masks or places of what the batch
alone says. What it computes with parameters is the same calls for any number of samples all the
same. Of the rest, what is not made alike becomes a value of the whole batch, `merakc.known`, that
the recording of the whole batch makes; the part's own way to it is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from merakc.ir.graph import Graph, InputKind, Node, Ref, TensorSpec, map_refs
from merakc.kernels.draws import KEY_POSITION

KNOWN = "merakc.known.default"  # a value of the whole batch, which a part does not make
WITHIN = "merakc.within.default"  # places that the whole batch alone says
ALIAS = "aten.alias.default"
OWN = "whole."  # before the names of what only the recording of the whole batch has
Alike = Callable[[Node, Node], bool]
Pair = tuple[Ref, Ref]


def is_own(name: str) -> bool:
    """Whether a value is of the recording of the whole batch alone."""
    return name.startswith(OWN)


def common(graph: Graph) -> Graph:
    """The graph without what only the recording of the whole batch has."""
    names = (*(i.name for i in graph.inputs), *(n.name for n in graph.nodes))
    if not any(map(is_own, names)) and all(n.op != WITHIN for n in graph.nodes):
        return graph
    nodes = (
        replace(n, op=KNOWN, args=())
        if n.op == WITHIN or any(is_own(r.node) for r in n.refs)
        else n
        for n in graph.nodes
        if not is_own(n.name)
    )
    inputs = tuple(i for i in graph.inputs if not is_own(i.name))
    return replace(graph, inputs=inputs, nodes=tuple(nodes))


def aligned(part: Graph, whole: Graph, alike: Alike) -> tuple[Graph, Graph]:
    """Both graphs with their calls under the names of the part's, where they have a common form;
    as they are where they have none. `alike` says of two calls whether they are the same, but for
    what they read.
    """
    try:
        return _Aligner(part, whole, alike).graphs()
    except _UnlikeError:
        return part, whole


class _UnlikeError(Exception):
    """Two recordings that have no common form."""


def _known(graph: Graph) -> set[str]:
    """The nodes and inputs that no parameter and no draw stands before."""
    known = {i.name for i in graph.inputs if i.kind in (InputKind.BATCH, InputKind.CONSTANT)}
    for node in graph.nodes:
        if all(r.node in known for r in node.refs) and node.op not in KEY_POSITION:
            known.add(node.name)
    return known


@dataclass(eq=False)
class _Aligner:
    part: Graph
    whole: Graph
    alike: Alike
    nodes: list[Node] = field(default_factory=list)
    twins: list[Node] = field(default_factory=list)
    found: dict[Pair, Ref] = field(default_factory=dict)  # what two known values are now
    constants: dict[str, str] = field(default_factory=dict)  # the part's, and the whole's for it
    same: dict[Pair, bool] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    cut: list[Ref] = field(default_factory=list)  # of the whole

    def __post_init__(self) -> None:
        self.mine, self.other = _known(self.part), _known(self.whole)
        self.ours = {n.name: n for n in self.part.nodes}
        self.theirs = {n.name: n for n in self.whole.nodes}
        self.specs = self.part.specs(), self.whole.specs()

    def graphs(self) -> tuple[Graph, Graph]:
        """The two graphs."""
        ours = [n for n in self.part.nodes if n.name not in self.mine]
        theirs = [n for n in self.whole.nodes if n.name not in self.other]
        if len(ours) != len(theirs) or len(self.part.outputs) != len(self.whole.outputs):
            raise _UnlikeError
        self.taken |= {n.name for n in ours} | {i.name for i in self.part.inputs}
        self.names = {t.name: n.name for n, t in zip(ours, theirs, strict=True)}
        for node, twin in zip(ours, theirs, strict=True):
            self._add(node, twin, node.name)
        ends = [(o.ref, t.ref) for o, t in zip(self.part.outputs, self.whole.outputs, strict=True)]
        now = [self._settled(pair) for pair in ends]
        return self._written(self.part, now), self._written(self.whole, now)

    def _add(self, node: Node, twin: Node, name: str) -> None:
        """Writes a node and its twin under one name."""
        if len(node.refs) == len(twin.refs):
            settled = [self._settled(pair) for pair in zip(node.refs, twin.refs, strict=True)]
            here, there = settled, settled
        else:  # samples that were taken apart
            if not self.mine.isdisjoint(r.node for r in node.refs):
                raise _UnlikeError
            here = list(node.refs)
            there = [Ref(self.names.get(r.node, r.node), r.index) for r in twin.refs]
        self.nodes.append(_reading(node, name, here))
        self.twins.append(_reading(twin, name, there))

    def _settled(self, pair: Pair) -> Ref:
        """What two values are in the common form."""
        mine, other = pair
        if (mine.node in self.mine) != (other.node in self.other):
            raise _UnlikeError
        if mine.node not in self.mine:
            if (self.names.get(other.node, other.node), other.index) != mine:
                raise _UnlikeError
            return mine
        if pair not in self.found and not self._is_alike(pair):
            self.found[pair] = self._cut(pair)
        waiting = [pair]
        while waiting:
            if waiting[-1] in self.found:
                waiting.pop()
            else:
                waiting += self._before(waiting[-1])
        return self.found[pair]

    def _is_alike(self, pair: Pair) -> bool:
        """Whether two known values are made by the same calls, all the way from the batch."""
        waiting = [pair]
        while waiting:
            mine, other = waiting[-1]
            node, twin = self.ours.get(mine.node), self.theirs.get(other.node)
            if waiting[-1] in self.same:
                waiting.pop()
            elif node is None or twin is None:
                self.same[waiting[-1]] = node is twin and self._is_input(mine, other)
            elif (
                mine.index != other.index
                or not self.alike(node, twin)
                or len(node.refs) != len(twin.refs)
            ):
                self.same[waiting[-1]] = False
            else:
                pairs = list(zip(node.refs, twin.refs, strict=True))
                unknown = [p for p in pairs if p not in self.same]
                waiting += unknown
                if not unknown:
                    self.same[mine, other] = all(self.same[p] for p in pairs)
        return self.same[pair]

    def _is_input(self, mine: Ref, other: Ref) -> bool:
        """Whether two inputs are the same; a tensor made in Python is for one in the other."""
        constant = mine.node in self.part.constants
        if constant != (other.node in self.whole.constants):
            return False
        held = self.constants.setdefault(mine.node, other.node) if constant else mine.node
        return held == other.node

    def _before(self, pair: Pair) -> list[Pair]:
        """What is to be written before two values that are made alike; nothing once they are."""
        mine, other = pair
        node, twin = self.ours.get(mine.node), self.theirs.get(other.node)
        if node is None or twin is None:
            self.found[pair] = mine
            return []
        before = [p for p in zip(node.refs, twin.refs, strict=True) if p not in self.found]
        if not before:
            name = self._unique(node.name)
            self._add(node, twin, name)
            for k in range(len(node.outputs)):
                self.found[Ref(node.name, k), Ref(twin.name, k)] = Ref(name, k)
        return before

    def _cut(self, pair: Pair) -> Ref:
        """A value that is made otherwise for the whole batch."""
        one, two = self.specs[0][pair[0]], self.specs[1][pair[1]]
        if one.dtype != two.dtype or len(one.shape) != len(two.shape):
            raise _UnlikeError
        maker = self.theirs.get(pair[1].node) or Node("", "", (), (), ())
        name = self._unique("known")
        where = maker.module, maker.source, False

        def made(op: str, args: tuple[Any, ...], spec: TensorSpec) -> Node:
            return Node(name, op, args, (), (spec,), *where)

        self.cut.append(pair[1])
        self.nodes.append(made(KNOWN, (), one))
        self.twins.append(made(ALIAS, (self._own(pair[1]),), two))
        return Ref(name)

    def _own(self, ref: Ref) -> Ref:
        """A value that only the recording of the whole batch has."""
        batch = ref.node not in self.theirs and ref.node not in self.whole.constants
        return ref if batch else Ref(OWN + ref.node, ref.index)

    def _unique(self, name: str) -> str:
        count, found = 0, name
        while found in self.taken:
            count, found = count + 1, f"{name}.{count}"
        self.taken.add(found)
        return found

    def _written(self, graph: Graph, outputs: Sequence[Ref]) -> Graph:
        """One of the graphs, with these values as its outputs."""
        is_whole = graph is self.whole
        nodes: list[Node] = []
        inputs = [i for i in graph.inputs if i.kind is not InputKind.CONSTANT]
        held = {i.name: i for i in graph.inputs if i.kind is InputKind.CONSTANT}
        constants = {}
        for mine, other in self.constants.items():
            source = other if is_whole else mine
            inputs.append(replace(held[source], name=mine))
            constants[mine] = graph.constants[source]
        for node in self._behind_cuts() if is_whole else ():
            nodes.append(_reading(node, OWN + node.name, [self._own(r) for r in node.refs]))
        read = {r.node for n in (*nodes, *self.twins) for r in n.refs} if is_whole else set()
        for name, item in held.items():
            if OWN + name in read:
                inputs.append(replace(item, name=OWN + name))
                constants[OWN + name] = graph.constants[name]
        nodes += self.twins if is_whole else self.nodes
        ends = tuple(o.at(r) for o, r in zip(graph.outputs, outputs, strict=True))
        return Graph(tuple(inputs), tuple(nodes), ends, constants, graph.functions)

    def _behind_cuts(self) -> list[Node]:
        """The nodes of the whole that make what is cut."""
        needed = {r.node for r in self.cut}
        kept = []
        for node in reversed(self.whole.nodes):
            if node.name in needed:
                kept.append(node)
                needed.update(r.node for r in node.refs)
        return kept[::-1]


def _reading(node: Node, name: str, refs: Sequence[Ref]) -> Node:
    """The node under another name, reading these values in the place of its own, in order."""
    given = iter(refs)
    args = map_refs(node.args, lambda _: next(given))
    kwargs = map_refs(node.kwargs, lambda _: next(given))
    return replace(node, name=name, args=args, kwargs=kwargs)
