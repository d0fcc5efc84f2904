"""A graph with two in the place of each run of equal blocks: what its parts cost, told in a
fraction of the time.

Two blocks are equal where one is the other with every value that it reads of itself, of the block
before it, of its own parameters and of what is given to it alone moved on by one block. A run of
equal blocks computes something else than one of them, but every block in it costs the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from merakc.ir.graph import Graph, InputKind, Node, Ref, map_refs
from merakc.kernels.draws import KEY_POSITION

_NUMBER = re.compile(r"(?<![^.])\d+(?=\.|$)")
STATES = (InputKind.PARAMETER, InputKind.BUFFER)


def shorten(
    graph: Graph, starts: Sequence[tuple[str, int]], keep: int = 2
) -> tuple[Graph, tuple[int, ...]]:
    """The graph with `keep` of each run of equal blocks, the first ones and the last, and for how
    many each part that is left stands: the one before the last for all that are gone.

    `starts` are the paths of the graph's parts, "" of what is no block, and their first nodes
    (`merakc.costs.work.pieces.part_starts`).
    """
    parts, runs = graph.told(_runs, tuple(starts))
    kept: list[int] = []
    counts: list[int] = []
    now: dict[str, str] = {}  # what stands in the place of a node that is gone
    for run in runs:
        gone = run[keep - 1 : -1]  # the results of the last are read by something else
        left = [k for k in run if k not in gone]
        kept += left
        counts += [1 + len(gone) * (j == keep - 2) for j in range(len(left))]
        for k in gone:
            now |= {n.name: m.name for n, m in zip(parts[k], parts[run[keep - 2]], strict=True)}
    if len(kept) == len(parts):
        return graph, tuple(counts)

    def moved(ref: Ref) -> Ref:
        return Ref(now.get(ref.node, ref.node), ref.index)

    nodes = [
        replace(
            node,
            args=map_refs(node.args, moved),
            kwargs=map_refs(node.kwargs, moved),
        )
        for k in kept
        for node in parts[k]
    ]
    outputs = tuple(o.at(moved(o.ref)) for o in graph.outputs)
    read = {r.node for node in nodes for r in node.refs} | {o.ref.node for o in outputs}
    inputs = tuple(i for i in graph.inputs if i.name in read)
    found = replace(graph, inputs=inputs, nodes=tuple(nodes), outputs=outputs)
    found.verify()
    return found, tuple(counts)


def _runs(
    graph: Graph, starts: Sequence[tuple[str, int]]
) -> tuple[list[tuple[Node, ...]], list[list[int]]]:
    """The nodes of each part of a graph, and the parts of each run of equal ones."""
    ends = [*(first for _, first in starts[1:]), len(graph.nodes)]
    parts = [graph.nodes[first:end] for (_, first), end in zip(starts, ends, strict=True)]
    forms = _Forms(graph, parts)
    runs: list[list[int]] = []
    for k, (path, _) in enumerate(starts):
        alike = path and runs and starts[runs[-1][0]][0] == path and forms.equal(runs[-1][0], k)
        if alike:
            runs[-1].append(k)
        else:
            runs.append([k])
    return parts, runs


def graph_form(graph: Graph) -> tuple[object, tuple[str, ...]]:
    """What a graph computes, whatever its values are called and wherever it draws, and the targets
    of its inputs in the order in which they are read: what costs the same in graphs of one form.
    """
    inputs = {i.name: i for i in graph.inputs}
    places = {n.name: k for k, n in enumerate(graph.nodes)}
    given: dict[str, int] = {}

    def relative(ref: Ref) -> object:
        place = places.get(ref.node)
        return -1 - given.setdefault(ref.node, len(given)) if place is None else place, ref.index

    nodes = tuple(
        (n.op, _mapped(_unkeyed(n), relative), _mapped(n.kwargs, relative), n.outputs, n.grad)
        for n in graph.nodes
    )
    outputs = tuple((out.kind, relative(out.ref)) for out in graph.outputs)
    read = [inputs[name] for name in given]
    kinds = tuple((item.kind, item.spec, item.requires_grad) for item in read)
    return (nodes, outputs, kinds), tuple(item.target for item in read)


class _Forms:
    """The form of the nodes of each part, without the number of the part."""

    def __init__(self, graph: Graph, parts: Sequence[Sequence[Node]]) -> None:
        self.inputs = {i.name: i for i in graph.inputs}
        self.place = {n.name: (k, j) for k, part in enumerate(parts) for j, n in enumerate(part)}
        self.parts = parts
        self.readers: list[set[int]] = [set() for _ in parts]
        self.readers_of_input: dict[str, set[int]] = {name: set() for name in self.inputs}
        for k, part in enumerate(parts):
            self._read(k, (ref for node in part for ref in node.refs))
        self._read(len(parts), (out.ref for out in graph.outputs))
        self.known: dict[int, object] = {}

    def _read(self, reader: int, refs: Iterable[Ref]) -> None:
        for ref in refs:
            if ref.node in self.place:
                self.readers[self.place[ref.node][0]].add(reader)
            elif ref.node in self.inputs:
                self.readers_of_input[ref.node].add(reader)

    def equal(self, one: int, other: int) -> bool:
        """Whether all parts from one to the other are equal, and each is read by itself and by the
        next alone, until the last.
        """
        inner = range(one, other)
        return self._of(one) == self._of(other) and all(
            self.readers[k] <= {k, k + 1} for k in inner
        )

    def _of(self, part: int) -> object:
        if part not in self.known:
            given: dict[str, int] = {}  # to this part alone, in the order in which it reads them
            self.known[part] = tuple(self._node(node, part, given) for node in self.parts[part])
        return self.known[part]

    def _node(self, node: Node, part: int, given: dict[str, int]) -> object:
        def relative(ref: Ref) -> object:
            if ref.node in self.place:
                where, j = self.place[ref.node]
                near = part - where
                return (near, j, ref.index) if near in (0, 1) else ref
            item = self.inputs.get(ref.node)
            if item is not None and item.kind in STATES:
                return _NUMBER.sub("*", item.target), item.spec
            if item is None or len(self.readers_of_input[ref.node]) > 1:
                return ref
            return item.kind, given.setdefault(ref.node, len(given)), item.spec

        args, kwargs = _mapped(_unkeyed(node), relative), _mapped(node.kwargs, relative)
        return node.op, args, kwargs, node.outputs


def _unkeyed(node: Node) -> tuple[Any, ...]:
    """The arguments of a node, but for the key that every draw has of its own."""
    at = KEY_POSITION.get(node.op)
    return node.args if at is None else (*node.args[:at], None, *node.args[at + 1 :])


def _mapped(value: Any, relative: Any) -> Any:
    """Nested tuples with every `Ref` in another form."""
    if isinstance(value, Ref):
        return relative(value)
    if isinstance(value, (tuple, list)):
        return tuple(_mapped(item, relative) for item in value)
    if isinstance(value, Mapping):
        return tuple((k, _mapped(v, relative)) for k, v in value.items())
    return value
