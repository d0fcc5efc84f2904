"""Mixtures of experts in a graph: rows that are sorted by expert, computed on, and put back.

A row goes to an expert that its number (`ids`) says. The rows are taken in the order in which the
numbers are sorted; products of groups of rows (`merakc.grouped_mm`) give each group to its expert;
and the inverse of the order puts the results back. What is between may be computed on any part of
the rows by itself, since each row's result depends on its own number and values alone:

- the order is a permutation, so that what is read by it is there once, and comes back to its place;
- the ends of the groups are counted from the numbers that were sorted;
- every other call computes row by row.

Nothing is known by name: what does not prove to be so is no block, and stays whole.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import takewhile
from typing import Any

from merakc.ir.graph import Node, Ref
from merakc.passes.sharding.dims import Dims, given
from merakc.passes.sharding.experts.ends import (
    DIVISIONS,
    GROUPED,
    SORTS,
    ends_where_experts_do,
)
from merakc.passes.sharding.factors import Dim, Factor, leaves, size, unify
from merakc.passes.sharding.rows import POINTWISE
from merakc.passes.sharding.rules import row_of
from merakc.passes.sharding.spmd_ops import SPECIAL

COUNTS = "aten.arange.default"
# Ops that ranks with parts call in forms of their own, but with parts of rows as they are.
PLAIN = ("aten.split.Tensor", "aten.split_with_sizes.default", "aten.slice.Tensor",
         "aten.linear.default", "merakc.scaled_linear.default", "aten.mean.dim")  # fmt: skip


class Kind(Enum):
    """What a value of a block is."""

    PLACES = auto()  # where a row was before it was sorted, or the token of which it is a copy
    IDS = auto()  # the sorted numbers
    COUNTS = auto()  # what follows from those alone
    INVERSE = auto()  # where each row has come to
    EMPTY = auto()  # what the inverse is written to
    ROWS = auto()  # values in sorted order


@dataclass(frozen=True, slots=True)
class Experts:
    """A block: its `nodes`, in order, those of `counting` made from the number of rows alone.

    All of `rows` have an element, or a row, for each of them; the `sorted_rows` are computed with.
    The products of groups, `grouped`, read the `ends` of groups. The numbers `ids` are what is
    sorted; ranks may have parts of the factors `tokens` of their dim.
    """

    nodes: tuple[str, ...]
    counting: frozenset[str]
    rows: frozenset[Ref]
    sorted_rows: frozenset[Ref]
    grouped: tuple[str, ...]
    ends: Ref
    ids: Ref
    tokens: tuple[Factor, ...]


def find_experts(dims: Dims, rule: Callable[[Node], Dims]) -> tuple[Experts, ...]:
    """The blocks of a graph; `rule` gives the dims of a node by itself.

    The dims of their rows become those of the numbers that were sorted.
    """
    found = []
    for node in dims.graph.nodes:
        if _sorts(node):
            block = _Block(dims, rule, node).found()
            if block is not None:
                found.append(block)
    for block in found:
        own = dims.of[block.ids][0]
        for ref in block.rows:
            unify(dims.of[ref][0], own)
    return tuple(found)


def in_the_way(dims: Dims, rule: Callable[[Node], Dims]) -> Iterator[Node]:
    """The first node of what sorted numbers become that a block would not have; of a product of
    groups, it is where these end.
    """
    for node in dims.graph.nodes:
        if _sorts(node):
            block = _Block(dims, rule, node)
            if block.found() is None and block.fault is not None:
                yield block.fault


def _sorts(node: Node) -> bool:
    """Whether a node sorts a list, upwards."""
    listed = all(o is None or len(o.shape) == 1 for o in node.outputs)
    return node.op in SORTS and listed and not given(node, "descending")


@dataclass
class _Block:
    """What becomes of the numbers that one node sorts."""

    dims: Dims
    rule: Callable[[Node], Dims]
    sort: Node
    kinds: dict[Ref, Kind] = field(default_factory=dict)
    copies: dict[Ref, int] = field(default_factory=dict)  # rows of a token, by the places
    nodes: list[str] = field(default_factory=list)
    counting: set[str] = field(default_factory=set)
    results: list[Ref] = field(default_factory=list)
    grouped: list[str] = field(default_factory=list)
    ends: set[Ref] = field(default_factory=set)
    tokens: int = sys.maxsize  # how many of the outer factors of the numbers all values share
    fault: Node | None = None  # what is read in another way

    def found(self) -> Experts | None:
        """The block; None where something is read, or made, in another way."""
        graph, self.ids = self.dims.graph, self.sort.args[0]
        if self.dims.dtypes[self.ids].is_floating_point or len(self.sort.outputs) != 2:
            return None
        self.count = self.dims.shapes[self.ids][0]
        for node in graph.nodes:
            if node is self.sort:
                self._add(node, Kind.IDS, Kind.PLACES)
                self.copies[Ref(node.name, 1)] = 1
            elif any(r in self.kinds for r in node.refs) and not self._reads(node):
                self.fault = node
                return None
        if (
            not self.results
            or len(self.ends) != 1
            or any(o.ref in self.kinds for o in graph.outputs)
        ):
            return None
        nodes = {*self.nodes, *self.counting}
        counted, of_rows = {Ref(name) for name in self.counting}, (Kind.ROWS, Kind.IDS)
        rows = {r for r, kind in self.kinds.items() if kind is not Kind.COUNTS}
        return Experts(
            nodes=tuple(n.name for n in graph.nodes if n.name in nodes),
            counting=frozenset(self.counting),
            rows=frozenset({*rows, *counted, *self.results}),
            sorted_rows=frozenset(r for r, kind in self.kinds.items() if kind in of_rows),
            grouped=tuple(self.grouped),
            ends=self.ends.pop(),
            ids=self.ids,
            tokens=tuple(leaves(self.dims.of[self.ids][0])[: self.tokens]),
        )

    def _add(self, node: Node, *kinds: Kind) -> bool:
        self.nodes.append(node.name)
        self.kinds.update({Ref(node.name, k): kind for k, kind in enumerate(kinds)})
        return True

    def _kind(self, value: Any) -> Kind | None:
        return self.kinds.get(value) if isinstance(value, Ref) else None

    def _reads(self, node: Node) -> bool:
        """Adds a node that reads values of the block; False where it does so in another way."""
        kinds = {self.kinds.get(ref) for ref in node.refs if not self._is_constant(ref)}
        if node.op == "aten.index.Tensor":
            return self._index(node)
        if node.op == "aten.index_put.default":
            return self._inverse(node)
        if node.op == GROUPED:
            return self._product(node)
        if kinds == {Kind.PLACES}:
            return self._places(node)
        if kinds == {Kind.IDS}:
            return self._counts(node) or self._by_row(node)
        if kinds == {Kind.COUNTS}:
            return self._add(node, *(Kind.COUNTS for _ in node.outputs))
        return self._by_row(node)

    def _is_constant(self, ref: Ref) -> bool:
        """Whether a value is made from nothing, and not from the number of rows."""
        if ref in self.kinds or self.count in self.dims.shapes[ref]:
            return False
        maker = next((n for n in self.dims.graph.nodes if n.name == ref.node), None)
        return maker is not None and not maker.refs and self.count not in maker.args

    def _places(self, node: Node) -> bool:
        """The token of which a row is a copy, and what the inverse is written to."""
        if node.op in ("aten.empty_like.default", "aten.zeros_like.default"):
            return self._add(node, Kind.EMPTY)
        if _sorts(node) and self.copies[node.args[0]] == 1:
            self.copies[Ref(node.name)] = 0  # of two results the first are the numbers from 0 on
            return self._add(node, *(Kind.PLACES, Kind.INVERSE)[-len(node.outputs) :])
        mode = given(node, "rounding_mode") if node.op == DIVISIONS[1] else "floor"
        if node.op not in DIVISIONS or mode != "floor" or self.copies[node.args[0]] != 1:
            return False
        if not isinstance(node.args[1], int) or node.args[1] < 1:
            return False
        self.copies[Ref(node.name)] = node.args[1]
        return self._add(node, Kind.PLACES)

    def _counts(self, node: Node) -> bool:
        """Something of the sorted numbers: of each by itself, or of all, whatever their number."""
        if row_of(node.op) == POINTWISE and node.op not in SPECIAL:
            return self._add(node, Kind.IDS)
        own = (o for o in node.outputs if o is not None)
        counted = any(arg == self.count for arg in node.args) or any(
            self.count in o.shape for o in own
        )
        return not counted and self._add(node, *(Kind.COUNTS for _ in node.outputs))

    def _index(self, node: Node) -> bool:
        """Values taken in sorted order, or sorted ones that are put back; those of each expert."""
        source, places = node.args
        if len(places) != 1 or not isinstance(places[0], Ref):
            return False
        own, by = self._kind(source), self._kind(places[0])
        if own is Kind.ROWS and by is Kind.INVERSE:
            self.nodes.append(node.name)
            self.results.append(Ref(node.name))
            return True
        if own is not None or by not in (Kind.PLACES, Kind.IDS):
            return False
        if by is Kind.PLACES and not self._goes_with(source, self.copies[places[0]]):
            return False
        return self._add(node, Kind.ROWS)

    def _goes_with(self, source: Ref, copies: int) -> bool:
        """Whether so many of the numbers, one behind the other, are of each row of a value: also of
        the rows of any part of the tokens.
        """
        every, own = leaves(self.dims.of[self.ids][0]), leaves(self.dims.of[source][0])
        same = sum(
            1 for _ in takewhile(lambda pair: pair[0] is pair[1], zip(every, own, strict=False))
        )
        self.tokens = min(self.tokens, same)
        return size(every[same:]) == copies * size(own[same:])

    def _inverse(self, node: Node) -> bool:
        """Counted places, written to where the permutation says."""
        target, places, values = node.args[:3]
        if len(places) != 1 or self.copies.get(places[0]) != 1 or given(node, "accumulate"):
            return False
        if not self._made_here(values, node, COUNTS, self.count):
            return False
        if self._kind(target) is not Kind.EMPTY and not self._made_here(
            target, node, "aten.full.default", (self.count,)
        ):
            return False
        return self._add(node, Kind.INVERSE)

    def _made_here(self, ref: Ref, reader: Node, op: str, count: Any) -> bool:
        """Whether a value is made from nothing, with as many elements as there are rows, for one
        reader; then it is of the block.
        """
        maker = next((n for n in self.dims.graph.nodes if n.name == ref.node), None)
        if maker is None or maker.op != op or maker.args[0] != count or maker.refs:
            return False
        if len(maker.args) > (op != COUNTS) + 1:
            return False
        if any(ref in n.refs for n in self.dims.graph.nodes if n is not reader):
            return False
        self.counting.add(maker.name)
        return True

    def _product(self, node: Node) -> bool:
        """Rows times the matrices of their experts."""
        x, weights, ends = node.args
        if self._kind(x) is not Kind.ROWS or self._kind(weights) is not None:
            return False
        if not ends_where_experts_do(self.dims.graph, Ref(self.sort.name), ends):
            return False
        self.grouped.append(node.name)
        self.ends.add(ends)
        return self._add(node, Kind.ROWS)

    def _by_row(self, node: Node) -> bool:
        """Whether the node makes each row of its results of the same row of its arguments."""
        if node.op in SPECIAL and node.op not in PLAIN:
            return False
        rule = self.rule(node)
        aliases = {ref: Ref(f"x{k}") for k, ref in enumerate(dict.fromkeys(node.refs))}
        owns = [rule.of[a][:1] for ref, a in aliases.items() if ref in self.kinds]
        others = [d for ref, a in aliases.items() if ref not in self.kinds for d in rule.of[a]]
        outs = [rule.of[Ref("node", k)][:1] for k, o in enumerate(node.outputs) if o is not None]
        kinds = {self.kinds[ref] for ref in aliases if ref in self.kinds}
        if not kinds <= {Kind.ROWS, Kind.IDS}:
            return False
        found: list[Dim] = [leaves(dims[0]) if dims else [] for dims in (*owns, *outs)]
        own, barred = (
            found[0],
            [f for d in (*others, *rule.summed.get("node", ())) for f in leaves(d)],
        )
        if not own or any(dim != own for dim in found) or set(own) & set(barred):
            return False
        if any(f.blocked or f.segments for f in own):
            return False
        kind = Kind.ROWS if Kind.ROWS in kinds else Kind.IDS
        return self._add(node, *(kind for _ in node.outputs))
