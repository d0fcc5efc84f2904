"""Carries factors through a graph: which dims of which values are one and the same.

Nothing here knows a model: head counts, grouped key/value heads and packed projections appear
where reshapes, splits and products divide and join dims.
"""

from __future__ import annotations

from merakc.ir.graph import Graph, InputKind, Node, Ref
from merakc.passes.dims import Dims, argument, broadcast, opaque
from merakc.passes.factors import Dim, block, size, unify
from merakc.passes.rules import POINTWISE, Along, Reduce, row_of
from merakc.passes.shapes import SHAPES

WHOLE = "!"


def propagate(graph: Graph) -> Dims:
    """The factors of every value of the graph."""
    dims = Dims(graph, {ref: spec.shape for ref, spec in graph.specs().items()})
    for item in graph.inputs:
        whole = "a dim of the batch" if item.kind is InputKind.BATCH else ""
        dims.fresh(Ref(item.name), whole)
    for node in graph.nodes:
        row = row_of(node.op)
        if row is None:
            dims.opaque.append(node)
            opaque(dims, node)
        elif row == POINTWISE:
            _pointwise(dims, node)
        elif isinstance(row, str):
            _einsum(dims, node, row)
        elif isinstance(row, Along):
            _along(dims, node, row)
        elif isinstance(row, Reduce):
            _reduce(dims, node, row)
        else:
            SHAPES[row.name](dims, node)
    return dims


def _pointwise(dims: Dims, node: Node) -> None:
    for index, spec in enumerate(node.outputs):
        if spec is not None:
            dims.put(node, broadcast(dims, list(node.refs), spec.shape), index)


def _einsum(dims: Dims, node: Node, row: str) -> None:
    left, right = row.split("->")
    letters: dict[str, Dim] = {}
    dots: list[Dim] = []
    for k, part in enumerate(left.split(",")):
        arg = node.args[k] if k < len(node.args) else None
        if not isinstance(arg, Ref):
            assert "?" in part, f"{node}: argument {k} is missing"
            continue
        names = part.replace("?", "").split()
        own = dims.of[arg]
        lead = len(own) - len(names) + 1 if names[0] == "..." else 0
        if names[0] == "...":
            dots, names = own[:lead], names[1:]
        for name, dim in zip(names, own[lead:], strict=True):
            letter = name.rstrip(WHOLE)
            before = letters.get(letter, [])
            if size(before) == 1:
                letters[letter] = dim
            elif size(dim) > 1:
                unify(before, dim)
            if name.endswith(WHOLE):
                block(dim, node.op)
    out: list[Dim] = []
    for name in right.split():
        out += dots if name == "..." else [letters[name.rstrip(WHOLE)]]
    dims.put(node, out)
    kept = set(right.split())
    dims.summed[node.name] = [dim for letter, dim in letters.items() if letter not in kept]


def _along(dims: Dims, node: Node, row: Along) -> None:
    """All tensor arguments have the output's rank; the named dims are needed whole."""
    named = node.args[row.argument] if len(node.args) > row.argument else row.default
    for ref in node.refs:
        own = dims.of[ref]
        for k in named if isinstance(named, tuple) else (named,):
            block(own[k], node.op)
    first = node.refs[0]
    rank = len(dims.of[first])
    chosen = {k % rank for k in (named if isinstance(named, tuple) else (named,))}
    for ref in node.refs[1:]:
        for k, dim in enumerate(dims.of[ref]):
            if k not in chosen:
                unify(dims.of[first][k], dim)
    for index, spec in enumerate(node.outputs):
        if spec is not None:
            dims.put(node, list(dims.of[first]), index)


def _reduce(dims: Dims, node: Node, row: Reduce) -> None:
    own = dims.of[node.refs[0]]
    named = argument(node, 1, "dim")
    if named is None or named == ():
        named = tuple(range(len(own)))
    chosen = {k % max(len(own), 1) for k in (named if isinstance(named, tuple) else (named,))}
    gone = [d for k, d in enumerate(own) if k in chosen]
    if row.partial:
        dims.summed[node.name] = gone
    else:
        for dim in gone:
            block(dim, node.op)
    for index, spec in enumerate(node.outputs):
        if spec is None:
            continue
        keep = len(spec.shape) == len(own)
        out = [[] if k in chosen else d for k, d in enumerate(own) if keep or k not in chosen]
        dims.put(node, out, index)
