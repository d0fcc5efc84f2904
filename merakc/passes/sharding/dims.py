"""The dims of a graph's values, while factors are carried through it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from itertools import zip_longest
from typing import Any

import torch

from merakc.ir.graph import Graph, Node, Ref
from merakc.kernels.ops import resolve_op
from merakc.passes.sharding.factors import Dim, block, new_dim, size, unify


@dataclass(slots=True)
class Dims:
    """The dims of every value, the factors that each node sums over, the ops without a rule."""

    graph: Graph
    shapes: dict[Ref, tuple[int, ...]]
    dtypes: dict[Ref, torch.dtype]
    of: dict[Ref, list[Dim]] = field(default_factory=dict)
    summed: dict[str, list[Dim]] = field(default_factory=dict)
    opaque: list[Node] = field(default_factory=list)

    def fresh(self, ref: Ref, blocked: str = "") -> list[Dim]:
        """New dims for a value."""
        self.of[ref] = [new_dim(s, blocked) for s in self.shapes[ref]]
        return self.of[ref]

    def put(self, node: Node, dims: list[Dim], index: int = 0) -> None:
        """Sets the dims of an output."""
        shape = self.shapes[Ref(node.name, index)]
        assert [size(d) for d in dims] == list(shape), (str(node), [size(d) for d in dims])
        self.of[Ref(node.name, index)] = dims


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """An argument given by position or by name."""
    if len(node.args) > position:
        return node.args[position]
    return dict(node.kwargs).get(name, default)


def given(node: Node, name: str) -> Any:
    """An argument by the name that the op's schema gives it; its default where it is left out."""
    position, default = signature(node.op)[name]
    return argument(node, position, name, default)


@cache
def signature(op: str) -> dict[str, tuple[int, Any]]:
    """Position and default of each argument of an op, by name."""
    arguments = resolve_op(op)._schema.arguments  # type: ignore[attr-defined]
    return {a.name: (k, a.default_value) for k, a in enumerate(arguments)}


def named_dims(node: Node, name: str, rank: int) -> set[int]:
    """The dims that an argument names, from the front; all of them where it names none."""
    named = given(node, name) if name in signature(node.op) else None
    if named is None or named == () or named == []:
        return set(range(rank))
    each = named if isinstance(named, (tuple, list)) else (named,)
    return {k % max(rank, 1) for k in each}


def need_whole(dim: Dim, node: Node) -> None:
    """Says that the node needs the dim whole."""
    block(dim, f"{node.op} at {node.source}")


def opaque(dims: Dims, node: Node, why: str = "") -> None:
    """Everything whole."""
    why = f"{why or node.op} at {node.source}"
    for ref in node.refs:
        for dim in dims.of[ref]:
            block(dim, why)
    for index, spec in enumerate(node.outputs):
        if spec is not None:
            dims.fresh(Ref(node.name, index), why)


def broadcast(dims: Dims, refs: list[Ref], shape: tuple[int, ...]) -> list[Dim]:
    """The dims of an elementwise result; equal dims are unified from the right."""
    found = broadcast_dims([dims.of[ref] for ref in refs], len(shape))
    return [d if size(d) == s else new_dim(s) for d, s in zip(found, shape, strict=True)]


def broadcast_dims(owns: list[list[Dim]], rank: int) -> list[Dim]:
    """Lists of dims unified from the right; where all are of size 1, so is the result."""
    found: list[Dim] = [[] for _ in range(rank)]
    for own in owns:
        for k, dim in enumerate(own, rank - len(own)):
            found[k] = merged(found[k], dim)
    return found


def merged(before: Dim, dim: Dim) -> Dim:
    """Two dims that are the same, or of which one is of size 1 and broadcasts."""
    if size(before) == 1:
        return dim
    if size(dim) > 1:
        unify(before, dim)
    return before


def broadcast_shape(shapes: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of an elementwise result."""
    columns = zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1)
    return tuple(reversed([next((n for n in column if n != 1), 1) for column in columns]))
