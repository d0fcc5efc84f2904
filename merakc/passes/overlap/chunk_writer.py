"""Writes parts of a graph once for each of several chunks of rows.

A node of such a part becomes as many nodes as there are chunks, in its place: each is what
`merakc.passes.sharding.spmd_ops` makes of it for one of so many ranks, with the rows split over
them. What the others read of it is joined, and what it reads of theirs is cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from merakc.ir.graph import Graph, Node, Ref, TensorSpec, map_refs
from merakc.ir.layout import Layout
from merakc.kernels.draws import KEY_POSITION
from merakc.passes.sharding.layouts import Sharding
from merakc.passes.sharding.spmd_ops import SPECIAL

# Collectives that change a dim: whether it grows.
SHAPED: Final = {
    "merakc.all_gather.default": True,
    "merakc.gather_to.default": True,
    "merakc.reduce_scatter.default": False,
    "merakc.scatter.default": False,
}
COLLECTIVES: Final = frozenset({*SHAPED, "merakc.all_reduce.default", "merakc.copy_to.default"})
SPLIT, CAT, RESHAPE = "aten.split_with_sizes.default", "aten.cat.default", "aten.reshape.default"


@dataclass(frozen=True)
class Region:
    """The nodes that are written in `count` chunks.

    `layouts` are those of all values that they read or write, with the rows split as if the chunks
    were ranks.
    """

    count: int
    nodes: frozenset[str]
    layouts: Mapping[Ref, Layout]


def write_chunks(graph: Graph, regions: Sequence[Region]) -> Graph:
    """The graph with the nodes of each region in its chunks; no node is in two regions.

    Nodes of chunk j have "#j" behind their names.
    """
    return _Writer(graph, regions).run()


class _Writer:
    """Writes the graph. `now` has the values that stand in the place of others."""

    def __init__(self, graph: Graph, regions: Sequence[Region]) -> None:
        self.graph, self.specs = graph, graph.specs()
        self.home = {name: region for region in regions for name in region.nodes}
        self.numbers = {id(region): k for k, region in enumerate(regions)}
        self.nodes: list[Node] = []
        self.now: dict[Ref, Ref] = {}
        self.chunk_of: dict[str, int] = {}
        self.cuts: dict[tuple[Ref, int], list[Ref]] = {}  # by value and region
        read = {
            r for n in graph.nodes for r in n.refs if self.home.get(r.node) is not self._home_of(n)
        }
        self.left = read | {o.ref for o in graph.outputs}

    def run(self) -> Graph:
        """The graph."""
        for node in self.graph.nodes:
            region = self._home_of(node)
            if region is not None:
                self._write(node, region)
            elif self.now.keys().isdisjoint(node.refs):
                self.nodes.append(node)
            else:
                args, kwargs = (map_refs(a, self._whole) for a in (node.args, node.kwargs))
                self.nodes.append(replace(node, args=args, kwargs=kwargs))
        outputs = tuple(o.at(self._whole(o.ref)) for o in self.graph.outputs)
        return replace(self.graph, nodes=self._in_order(), outputs=outputs)

    def _in_order(self) -> tuple[Node, ...]:
        """The nodes chunk after chunk, as far as nothing joins them in between.

        A list scheduler that takes what is first here would else have all chunks come to their next
        collective at once.
        """
        level: dict[str, int] = {}  # how often what a node depends on was joined
        for node in self.nodes:
            joins = node.name not in self.chunk_of
            level[node.name] = max(
                (level[r.node] + (joins and r.node in self.chunk_of)
                 for r in node.refs if r.node in level),
                default=0,
            )  # fmt: skip
        return tuple(
            sorted(self.nodes, key=lambda n: (level[n.name], self.chunk_of.get(n.name, -1)))
        )

    def _home_of(self, node: Node) -> Region | None:
        return self.home.get(node.name)

    def _whole(self, ref: Ref) -> Ref:
        return self.now.get(ref, ref)

    def _write(self, node: Node, region: Region) -> None:
        for ref in dict.fromkeys(node.refs):
            key = ref, id(region)
            if key not in self.cuts:
                is_cut = region.layouts[ref].is_split
                whole = self._whole(ref)
                self.cuts[key] = self._cut(ref, region) if is_cut else [whole] * region.count
        outs = [Ref(node.name, k) for k, o in enumerate(node.outputs) if o is not None]
        for ref in outs:
            self.cuts[ref, id(region)] = []
        for j in range(region.count):
            _Chunk(self, region, j).write(node)
            for ref in outs:
                self.cuts[ref, id(region)].append(Ref(f"{node.name}#{j}", ref.index))
        for ref in outs:
            if ref in self.left:
                self.now[ref] = self._join(ref, region)

    def _cut(self, ref: Ref, region: Region) -> list[Ref]:
        """The chunks of a value from outside of the region."""
        lay, dtype = region.layouts[ref], self.specs[ref].dtype
        dim, outer, lengths, flat = _rows(lay, region.count)
        source, stem = self._whole(ref), f"{ref.node}.{ref.index}#cut{self.numbers[id(region)]}"
        at, shape = dim, list(lay.shape)
        if outer > 1:
            shape = flat
            source = self._add(f"{stem}.rows", RESHAPE, (source, tuple(flat)), dtype, flat)
            at = dim + 1
        shapes = [[*shape[:at], n, *shape[at + 1 :]] for n in lengths]
        specs = tuple(TensorSpec(tuple(s), dtype) for s in shapes)
        self.nodes.append(Node(stem, SPLIT, (source, tuple(lengths), at), (), specs))
        parts = [Ref(stem, j) for j in range(region.count)]
        if outer == 1:
            return parts
        own = [lay.local_shape(region.count, j) for j in range(region.count)]
        return [self._add(f"{stem}.{j}", RESHAPE, (part, own[j]), dtype, own[j])
                for j, part in enumerate(parts)]  # fmt: skip

    def _join(self, ref: Ref, region: Region) -> Ref:
        """A value of the region, whole."""
        lay, dtype = region.layouts[ref], self.specs[ref].dtype
        dim, outer, lengths, flat = _rows(lay, region.count)
        parts, stem = self.cuts[ref, id(region)], f"{ref.node}.{ref.index}#joined"
        if outer == 1:
            return self._add(stem, CAT, (tuple(parts), dim), dtype, lay.shape)
        found = []
        for j, (part, length) in enumerate(zip(parts, lengths, strict=True)):
            own = [*flat[: dim + 1], length, *flat[dim + 2 :]]
            name = f"{stem}.{j}"
            found.append(self._add(name, RESHAPE, (part, tuple(own)), dtype, own))
        rows = self._add(f"{stem}.rows", CAT, (tuple(found), dim + 1), dtype, flat)
        return self._add(stem, RESHAPE, (rows, lay.shape), dtype, lay.shape)

    def _add(
        self, name: str, op: str, args: tuple[Any, ...], dtype: torch.dtype, shape: Sequence[int]
    ) -> Ref:
        self.nodes.append(Node(name, op, args, (), (TensorSpec(tuple(shape), dtype),)))
        return Ref(name)


def _rows(lay: Layout, count: int) -> tuple[int, int, list[int], list[int]]:
    """The dim of the rows, the size of what is outside of them there, the lengths of the chunks
    with what is inside, and the shape with what is outside as a dim of its own.
    """
    (dim,) = (k for k, own in enumerate(lay.dims) if any(f.split for f in own))
    own = lay.dims[dim]
    at = next(k for k, f in enumerate(own) if f.split)
    outer = math.prod(f.size for f in own[:at])
    inner = math.prod(f.size for f in own[at + 1 :])
    lengths = [own[at].local_size(count, j) * inner for j in range(count)]
    shape = lay.shape
    return dim, outer, lengths, [*shape[:dim], outer, sum(lengths), *shape[dim + 1 :]]


class _Chunk:
    """One chunk of a region, as `merakc.passes.sharding.spmd_ops` sees a rank."""

    axis = "tp"

    def __init__(self, writer: _Writer, region: Region, index: int) -> None:
        self.writer, self.region, self.rank = writer, region, index
        self.sharding = Sharding(region.count, region.layouts, frozenset(), ())
        self.nodes, self.now = writer.nodes, writer.now

    def write(self, node: Node) -> None:
        """Adds the chunk's form of a node."""
        special: Callable[[Any, Node], None] | None = SPECIAL.get(node.op)
        if node.op in SHAPED:
            self._resized(node)
        elif node.op in KEY_POSITION:
            self._drawn(node)
        elif special is not None:
            special(self, node)
        else:
            self.add(node, map_refs(node.args, self.enter))

    def local_shape(self, node: Node, index: int = 0) -> tuple[int, ...]:
        """The chunk's shape of one of the node's outputs."""
        return self._shape(Ref(node.name, index))

    def _shape(self, ref: Ref) -> tuple[int, ...]:
        return self.region.layouts[ref].local_shape(self.region.count, self.rank)

    def is_split(self, ref: Ref) -> bool:
        """Whether the chunks have parts of a value."""
        return self.region.layouts[ref].is_split

    def enter(self, ref: Ref) -> Ref:
        """The chunk's part of a value."""
        return self.writer.cuts[ref, id(self.region)][self.rank]

    read = enter

    def add(self, node: Node, args: Any, op: str | None = None) -> None:
        """Adds a node of the chunk."""
        kwargs = map_refs(node.kwargs, self.enter)
        outputs = tuple(
            None if o is None else TensorSpec(self.local_shape(node, k), o.dtype)
            for k, o in enumerate(node.outputs)
        )
        name = f"{node.name}#{self.rank}"
        self.writer.chunk_of[name] = self.rank
        self.nodes.append(
            replace(node, name=name, op=op or node.op, args=args, kwargs=kwargs, outputs=outputs)
        )

    def named(self, ref: Ref, what: str) -> str:
        """The name of a node that makes something of a value."""
        return f"{ref.node}#{self.rank}.{what}"

    def add_sum(self, node: Node, op: str, args: Any) -> Ref:
        """No node of a region sums over its rows."""
        raise AssertionError(node)

    def add_bias(self, node: Node, total: Ref, bias: Ref | None, view: tuple[int, ...]) -> None:
        """Nor has one a bias apart."""
        raise AssertionError(node)

    def constant(self, name: str, value: torch.Tensor) -> Ref:
        """Nor is one made from nothing."""
        raise AssertionError(name)

    def _resized(self, node: Node) -> None:
        """A gather or scatter whose dim may be that of the rows: every rank has as many of them."""
        ref, axis, dim, sizes, rank = node.args
        if any(f.split for f in self.region.layouts[ref].dims[dim]):
            own = self._shape(ref if SHAPED[node.op] else Ref(node.name))[dim]
            sizes = (own,) * len(sizes)
        self.add(node, (self.enter(ref), axis, dim, sizes, rank))

    def _drawn(self, node: Node) -> None:
        """Makes a chunk's draw that block of rows of the whole draw."""
        at = KEY_POSITION[node.op]
        layouts, count = self.region.layouts, self.region.count
        block = _block(node, layouts[Ref(node.name)], count, self.rank)
        assert block is not None, node
        args = *map_refs(node.args[:at], self.enter), node.args[at], *block
        self.add(node, args)


def draws_apart(node: Node, lay: Layout) -> bool:
    """Whether a chunk of rows of a draw is one block of the whole draw; True for other nodes."""
    return node.op not in KEY_POSITION or _block(node, lay, 2, 0) is not None


_Block = tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def _block(node: Node, lay: Layout, count: int, index: int) -> _Block | None:
    """The arguments `sample, sizes, starts, local_sizes` (`merakc.kernels.draws`) of a chunk.

    The elements are those of the value in their order, so that the rows are a factor of one dim of
    the array, or None where they are not.
    """
    sample, *arrays = node.args[KEY_POSITION[node.op] + 1 :][:4]
    sizes, starts, local = (list(a) for a in arrays)
    dim, _, lengths, flat = _rows(lay, count)
    before, rows = math.prod(flat[: dim + 1]), sum(lengths)
    k = 0
    while k < len(local) and before % local[k] == 0 and before >= local[k]:
        if before == 1 and local[k] > 1:
            break
        before //= local[k]
        k += 1
    if k == len(local) or local[k] % (before * rows):
        return None
    inner = local[k] // (before * rows)
    first = sum(lengths[:index]) * inner
    if before == 1:
        starts[k] += first
        local[k] = lengths[index] * inner
    elif local[k] == sizes[k] and k != sample:
        sizes[k : k + 1] = [before, rows * inner]
        starts[k : k + 1] = [0, first]
        local[k : k + 1] = [before, lengths[index] * inner]
        sample += sample > k
    else:
        return None
    return sample, tuple(sizes), tuple(starts), tuple(local)
