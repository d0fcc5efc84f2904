"""The dims of a graph's values, while factors are carried through it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from merakc.ir.graph import Graph, Node, Ref
from merakc.passes.factors import Dim, block, new_dim, size, unify


@dataclass(slots=True)
class Dims:
    """The dims of every value, the factors that each node sums over, the ops without a rule."""

    graph: Graph
    shapes: dict[Ref, tuple[int, ...]]
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


def opaque(dims: Dims, node: Node) -> None:
    """Everything whole."""
    why = f"{node.op} at {node.source}"
    for ref in node.refs:
        for dim in dims.of[ref]:
            block(dim, why)
    for index, spec in enumerate(node.outputs):
        if spec is not None:
            dims.fresh(Ref(node.name, index), why)


def broadcast(dims: Dims, refs: list[Ref], shape: tuple[int, ...]) -> list[Dim]:
    """The dims of an elementwise result; equal dims are unified from the right."""
    found: list[Dim | None] = [None] * len(shape)
    for ref in refs:
        own = dims.of[ref]
        offset = len(shape) - len(own)
        for k, dim in enumerate(own):
            if size(dim) == 1:
                continue
            before = found[offset + k]
            if before is None:
                found[offset + k] = dim
            else:
                unify(before, dim)
    return [d if d is not None else new_dim(s) for d, s in zip(found, shape, strict=True)]
