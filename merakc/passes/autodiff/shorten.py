"""A graph with two in the place of each run of equal blocks: what its parts cost, told in a
fraction of the time. Where blocks take turns, as layers of windows and of whole texts do, a run is
of equal turns, each of several blocks.

Two blocks are equal where one is the other with every value that it reads of itself, of the block
before it, of its own parameters and of what is given to it alone moved on by one block. A run of
equal blocks computes something else than one of them, but every block in it costs the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, takewhile
from operator import itemgetter
from typing import Any, TypeVar

from merakc.ir.graph import Graph, InputKind, Node, Ref, map_refs
from merakc.kernels.draws import KEY_POSITION

# Blocks that take turns at most.
MOST_TURNS = 8
_NUMBER = re.compile(r"(?<![^.])\d+(?=\.|$)")
T = TypeVar("T")
STATES = (InputKind.PARAMETER, InputKind.BUFFER)


def shorten(
    graph: Graph, starts: Sequence[tuple[str, int]], keep: int = 2
) -> tuple[Graph, tuple[int, ...]]:
    """The graph with `keep` of each run of equal blocks, the first ones and the last, and for how
    many each part that is left stands: the one before the last for all that are gone. Of blocks
    that take turns, those of a turn that stands for several stand side by side (`repeated`).

    `starts` are the paths of the graph's parts, "" of what is no block, and their first nodes
    (`merakc.costs.work.pieces.part_starts`).
    """
    parts, runs = graph.told(_runs, tuple(starts))
    kept: list[int] = []
    counts: list[int] = []
    now: dict[str, str] = {}  # what stands in the place of a node that is gone
    for run in runs:
        gone = run[keep - 1 : -1]  # the results of the last are read by something else
        for j, turn in enumerate([*run[: keep - 1], *run[keep - 1 :][-1:]]):
            kept += turn
            counts += [1 + len(gone) * (j == keep - 2)] * len(turn)
        for k, own in (pair for turn in gone for pair in zip(turn, run[keep - 2], strict=True)):
            now |= {n.name: m.name for n, m in zip(parts[k], parts[own], strict=True)}
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


def repeated(counts: Sequence[int], parts: Sequence[T]) -> list[T]:
    """The parts of a graph in their order, told by those of the short one."""
    found: list[T] = []
    for count, group in groupby(zip(counts, parts, strict=True), key=itemgetter(0)):
        turn = [part for _, part in group]
        found += turn * count
    return found


def _runs(
    graph: Graph, starts: Sequence[tuple[str, int]]
) -> tuple[list[tuple[Node, ...]], list[list[range]]]:
    """The nodes of each part of a graph, and the parts of each turn of each run of equal ones."""
    ends = [*(first for _, first in starts[1:]), len(graph.nodes)]
    parts = [graph.nodes[first:end] for (_, first), end in zip(starts, ends, strict=True)]
    forms, paths = _Forms(graph, parts), [path for path, _ in starts]
    runs: list[list[range]] = []
    k = 0
    while k < len(parts):
        alike = len(list(takewhile(paths[k].__eq__, paths[k:]))) if paths[k] else 1
        turns = range(1, min(alike // 2, MOST_TURNS) + 1)
        found = [forms.turns(k, k + alike, size) for size in turns]
        # What leaves out most; of one block each, where several leave out as much.
        runs.append(max(found, key=lambda run: max(len(run) - 2, 0) * len(run[0]),
                        default=[range(k, k + 1)]))  # fmt: skip
        k = runs[-1][-1].stop
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

    def turns(self, first: int, end: int, size: int) -> list[range]:
        """The turns of so many parts each, from the first on, that are equal, each read by itself
        and by the next alone, but for the last.
        """
        found = [range(first, first + size)]
        while found[-1].stop + size <= end:
            one, other = found[-1], range(found[-1].stop, found[-1].stop + size)
            near = {*one, *other}
            if [*map(self._of, one)] != [*map(self._of, other)]:
                break
            if not all(self.readers[k] <= near for k in one):
                break
            found.append(other)
        return found

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
